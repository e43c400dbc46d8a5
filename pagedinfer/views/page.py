"""The frame of every offline page: heading, summary, the view, and its picture where scripts are off."""

from __future__ import annotations

__all__ = ["KEYS", "PAGE"]

KEYS = "Left and Right step, Shift for ten, Home and End, Space plays."

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body class="pi-page-body">
<main>
<h1>{title}</h1>
{summary}
<h2 class="pi-unseen">Step by step</h2>
<div id="view"></div>
<noscript>{picture}</noscript>
{rest}
</main>
<script type="application/json" id="data">{data}</script>
<script type="module">
{script}
</script>
</body>
</html>
"""
