"""The two tokenizer families of Llama-style GGUF files, built with the `tokenizers` package.

`gpt2` is byte-level BPE: `pre` names the rule that splits a text into words before merging. `llama` is
SentencePiece BPE: no merges in the file but a score per piece, spaces written as U+2581, unknown characters
as bytes. The split rules are those of the models' own `tokenizer.json`, as ggml-org/llama.cpp's
`src/llama-vocab.cpp` records them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedinfer.errors import ModelError
from pagedinfer.model.checked import finite, flag, shown, texts, whole

__all__ = ["build_backend", "default_add_bos"]

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # values of tokenizer.ggml.token_type
_MAX_PIECE, _MAX_PIECES = 1000, 1 << 23  # characters of one piece and of all: each place to cut is tried
_SPACE = "\u2581"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

_GPT2_KINDS = ("gpt-2", "default")
_SPLITS = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "qwen2": _QWEN2}
_PRE = ("smollm", *_GPT2_KINDS, *_SPLITS)


def build_backend(metadata: Mapping[str, Any]) -> Any:
    """Build a `tokenizers.Tokenizer` from GGUF metadata; it adds no begin or end tokens by itself.

    Raises:
        ModelError: the `model` or `pre` type is not supported, or a part is missing.

    """
    from tokenizers import AddedToken

    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"tokenizer.ggml.model is {shown(kind)}; supported: gpt2 (byte-level BPE), llama (SentencePiece)"
        )
    if not tokens:
        raise ModelError(
            "the GGUF file has no tokenizer.ggml.tokens; a model without a tokenizer takes token ids only"
        )
    vocab = {token: index for index, token in enumerate(texts(tokens, "tokenizer.ggml.tokens"))}
    if len(vocab) < len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocab[token] != index)
        raise ModelError(f"tokenizer.ggml.tokens has {shown(twice)} twice; each token must have one id")
    backend = _byte_level(metadata, vocab) if kind == "gpt2" else _sentencepiece(metadata, vocab)
    types = metadata.get("tokenizer.ggml.token_type") or []
    if not isinstance(types, list) or len(types) not in (0, len(tokens)):
        raise ModelError(f"tokenizer.ggml.token_type is {shown(types)}; it must have a type for each token")
    for special, wanted in ((True, (_CONTROL, _UNKNOWN)), (False, (_USER_DEFINED,))):
        added = [
            AddedToken(token, normalized=False, special=special)
            for token, type_id in zip(tokens, types, strict=False)
            if type_id in wanted
        ]
        (backend.add_special_tokens if special else backend.add_tokens)(added)
    return backend


def default_add_bos(metadata: Mapping[str, Any]) -> bool:
    """Say whether prompts get a begin token where the file doesn't say: SentencePiece and Llama 3 do."""
    if metadata.get("tokenizer.ggml.bos_token_id") is None:
        return False
    return metadata.get("tokenizer.ggml.model") == "llama" or _SPLITS.get(_pre(metadata)) is _LLAMA3


def _pre(metadata: Mapping[str, Any]) -> str:
    return str(metadata.get("tokenizer.ggml.pre", "default"))


def _byte_level(metadata: Mapping[str, Any], vocab: dict[str, int]) -> Any:
    """Byte-level BPE: every byte has a printable letter, merges come in order of priority."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pre = _pre(metadata)
    if pre not in _PRE:
        raise ModelError(f"tokenizer.ggml.pre is {shown(pre)}; supported: {', '.join(_PRE)}")
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise ModelError("the GGUF file has no tokenizer.ggml.merges, which a byte-level tokenizer needs")
    pairs = [_pair(merge, vocab) for merge in texts(merges, "tokenizer.ggml.merges")]
    llama3 = _SPLITS.get(pre) is _LLAMA3
    backend = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=llama3))
    if pre in _SPLITS:
        first: list[Any] = [pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")]
    else:
        first = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _SPLITS)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*first, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _pair(merge: str, vocab: Mapping[str, int]) -> tuple[str, str]:
    """Split a merge, whose parts and result must be tokens."""
    left, _, right = merge.partition(" ")
    if not (left in vocab and right in vocab and left + right in vocab):
        raise ModelError(f"tokenizer.ggml.merges has {shown(merge)}, which is not made of tokens")
    return left, right


def _sentencepiece(metadata: Mapping[str, Any], vocab: dict[str, int]) -> Any:
    """SentencePiece BPE: a pair merges to a known piece, the best score first."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None:
        raise ModelError("the GGUF file has no tokenizer.ggml.scores, which a SentencePiece tokenizer needs")
    if not isinstance(scores, list) or len(scores) != len(vocab):
        raise ModelError(f"tokenizer.ggml.scores is {shown(scores)}; it must have a score for each token")
    for score in scores:
        finite(score, "an entry of tokenizer.ggml.scores")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    unknown = whole(unknown, "tokenizer.ggml.unknown_token_id", high=len(vocab) - 1)
    backend = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(vocab, scores),
            unk_token=metadata["tokenizer.ggml.tokens"][unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = flag(metadata, "tokenizer.ggml.add_space_prefix", True)
    rules = [normalizers.Prepend(_SPACE)] if prefix else []
    backend.normalizer = normalizers.Sequence([*rules, normalizers.Replace(" ", _SPACE)])
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges(vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Recover merges from scores: each way to make a piece of two known ones, by the piece's score."""
    longest = max(vocab, key=len)
    if len(longest) > _MAX_PIECE or sum(map(len, vocab)) > _MAX_PIECES:
        raise ModelError(
            f"tokenizer.ggml.tokens has pieces of up to {len(longest)} characters, "
            f"{sum(map(len, vocab))} in all; at most {_MAX_PIECE} and {_MAX_PIECES} are read"
        )
    ranked = []
    for piece, index in vocab.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[index], index, vocab[left], vocab[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]
