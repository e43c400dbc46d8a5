"""The command: what it refuses before a run, and how it ends when nobody reads on."""

import subprocess
import sys

import pytest

from pagedinfer.cli import main


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "--html '': it must be a file to write, like demo.html, not a folder."),
        (".", "--html '.': it must be a file to write, like demo.html, not a folder."),
        ("no/such/page.html", "--html 'no/such/page.html': there is no folder 'no/such'; create it first."),
    ],
)
def test_a_page_that_cannot_be_written_is_refused_before_the_run(name, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--tiny", "--html", name]) == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"pagedinfer: {said}\n")


def test_a_failing_disk_is_one_sentence(capsys, monkeypatch, tmp_path):
    def run_demo(**_):
        raise OSError(28, "No space left on device", "demo.html")

    monkeypatch.setattr("pagedinfer.demo.run_demo", run_demo)
    assert main(["demo", "--html", str(tmp_path / "demo.html")]) == 1
    assert capsys.readouterr().err == "pagedinfer: demo.html: No space left on device\n"


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["models", "list"]])
def test_a_reader_that_has_gone_ends_it_quietly(arguments):
    code = "import sys, pagedinfer.cli; sys.stdin.readline(); sys.exit(pagedinfer.cli.main(sys.argv[1:]))"
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        process.stdout.close()
        process.stdin.write(b"go\n")
        process.stdin.flush()
        assert process.stderr.read() == b""
    assert process.returncode in (0, 1)  # argparse swallows the failure of its own messages
