"""Text to ids and back, and chat templates, from a model's own files: a folder or GGUF metadata.

Tokenization itself is the `tokenizers` package's; this module hands it the right parts. A prompt gets exactly
one begin token, also when the text was rendered from a chat template that already holds it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pagedinfer.errors import ModelError, PagedInferError, RequestError
from pagedinfer.model.checked import check_regular, flag, printable, read_json, read_text, text_of, whole
from pagedinfer.model.config_fields import eos_ids, first_id

__all__ = ["TextTokenizer", "open_tokenizer"]


class TextTokenizer:
    """A tokenizer with the special tokens of its model; satisfies `pagedinfer.engine.protocols.Tokenizer`.

    Args:
        backend: a `tokenizers.Tokenizer`.
        vocab_size: number of ids that can be decoded.
        bos_token_id: the begin token, where there is one.
        eos_token_ids: all ids that end a text; the first of `eos_token_id` is the template's `eos_token`.
        eos_token_id: the one that the tokenizer itself calls its end token.
        add_bos: put the begin token before a prompt; None leaves begin and end to the backend.
        add_eos: put the end token after a prompt.
        chat_template: Jinja source, where there is one.
        template_tokens: further names for the template (`pad_token`, ...).

    Attributes:
        bad_byte_id: with byte fallback, a token whose byte alone is no character; see `engine.protocols.Tokenizer`.

    """

    def __init__(
        self,
        backend: Any,
        *,
        vocab_size: int,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        add_bos: bool | None = False,
        add_eos: bool = False,
        chat_template: str | None = None,
        template_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self.backend = backend
        self.vocab_size = vocab_size
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.eos_token_ids = eos_ids(eos_token_id, eos_token_ids)
        self.chat_template = chat_template
        with _guarded("the tokenizer does not work", ModelError):
            self.bad_byte_id = _bad_byte(backend)
        self.special_token_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        for asked, token_id, what in ((add_bos, bos_token_id, "begin"), (add_eos, eos_token_id, "end")):
            if asked and token_id is None:
                raise ModelError(f"the tokenizer asks for a {what} token on each prompt but names none")
        self._backend_decides = add_bos is None
        self._add_bos = _begins_with(backend, bos_token_id) if add_bos is None else add_bos
        self._add_eos = add_eos
        self._template_tokens = dict(template_tokens or {})
        for name, token_id in (("bos_token", bos_token_id), ("eos_token", eos_token_id)):
            token = None if token_id is None else backend.id_to_token(token_id)
            if token is not None:
                self._template_tokens[name] = token

    @classmethod
    def from_folder(cls, path: Path) -> TextTokenizer:
        """Read `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` of a model folder.

        Raises:
            ModelError: a file is missing or damaged.

        """
        from tokenizers import Tokenizer

        file = path / "tokenizer.json"
        if not file.exists():
            raise ModelError(f'"{path}" has no tokenizer.json; other tokenizer files are not read')
        check_regular(file)
        with _guarded(f'"{file}" cannot be read', ModelError):
            backend = Tokenizer.from_file(str(file))
            _stop_training(backend)
        config = _optional_json(path / "tokenizer_config.json")
        models = [_optional_json(path / name) for name in ("config.json", "generation_config.json")]
        names = _special_names(config)
        ids = {key: backend.token_to_id(name) for key, name in names.items()}
        bos = ids.get("bos_token")
        if bos is None:
            bos = first_id(*(item.get("bos_token_id") for item in models))
        return cls(
            backend,
            vocab_size=backend.get_vocab_size(with_added_tokens=True),
            bos_token_id=bos,
            eos_token_id=ids.get("eos_token"),
            eos_token_ids=eos_ids(*(item.get("eos_token_id") for item in models)),
            add_bos=None,  # tokenizer.json decides, also for transformers, whatever add_bos_token says
            chat_template=_folder_template(path, config),
            template_tokens=names,
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> TextTokenizer:
        """Build the tokenizer that GGUF metadata describe.

        Raises:
            ModelError: a kind of tokenizer that is not supported, named; or parts are missing.

        """
        from pagedinfer.model.gguf_tokenizer import build_backend, default_add_bos

        with _guarded("the tokenizer of the GGUF metadata cannot be built", ModelError):
            backend = build_backend(metadata)
        tokens = metadata["tokenizer.ggml.tokens"]

        def special(name: str) -> int | None:
            key = f"tokenizer.ggml.{name}_token_id"
            at = metadata.get(key)
            return None if at is None else whole(at, key, high=len(tokens) - 1)

        names = {"pad_token": special("padding"), "unk_token": special("unknown")}
        template = metadata.get("tokenizer.chat_template")
        return cls(
            backend,
            vocab_size=len(tokens),
            bos_token_id=special("bos"),
            eos_token_id=special("eos"),
            eos_token_ids=eos_ids(special("eot"), special("eom")),
            add_bos=flag(metadata, "tokenizer.ggml.add_bos_token", default_add_bos(metadata)),
            add_eos=flag(metadata, "tokenizer.ggml.add_eos_token", False),
            chat_template=None if template is None else text_of(template, "tokenizer.chat_template"),
            template_tokens={name: tokens[at] for name, at in names.items() if at is not None},
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. Special tokens written in the text become their ids.

        With `add_special_tokens` the prompt gets the begin (and end) token that the model expects, unless the
        text brings it along already.

        Raises:
            RequestError: the tokenizer has no way to write this text.

        """
        ids = self._encode(text, False)
        if not add_special_tokens:
            return ids
        has_bos = bool(ids) and ids[0] == self.bos_token_id
        if self._backend_decides:
            ids = self._encode(text, True)
            return ids[1:] if has_bos and self._add_bos else ids
        if self._add_bos and self.bos_token_id is not None and not has_bos:
            ids.insert(0, self.bos_token_id)
        if self._add_eos and self.eos_token_id is not None and ids[-1:] != [self.eos_token_id]:
            ids.append(self.eos_token_id)
        return ids

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        with _guarded("the model's tokenizer cannot encode this text", RequestError):
            ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are no text become the replacement mark U+FFFD."""
        with _guarded("the model's tokenizer cannot decode its tokens", ModelError):
            text: str = self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        tokenize: bool = True,
    ) -> list[int] | str:
        """Render a conversation with the model's own template, as ids or (`tokenize=False`) as text.

        Args:
            messages: each with "role" and "content".
            add_generation_prompt: end with the opening of the assistant's turn.
            tokenize: return ids. The template itself writes the special tokens; none is added.

        Raises:
            ModelError: the model has no chat template, or one that does not work.
            RequestError: the template refuses these messages.

        """
        text = self._render(messages, add_generation_prompt)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def _render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        from pagedinfer.model.chat_template import render_chat

        if self.chat_template is None:
            raise ModelError(
                "this model has no chat template; write the whole prompt as text and use generate"
            )
        for message in messages:
            if not {"role", "content"} <= message.keys():
                raise RequestError(f'a message has {sorted(message)}; it needs "role" and "content"')
        variables = {
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return render_chat(self.chat_template, variables | self._template_tokens)


def open_tokenizer(path: Path) -> TextTokenizer:
    """Open the tokenizer of a checkpoint: a model folder or a `.gguf` file.

    Raises:
        ModelError: there is none, or it is of a kind that is not supported.

    """
    from pagedinfer.model.weights import needs_engine

    path = Path(path)
    needs_engine("tokenizers", "jinja2")
    if path.is_dir():
        return TextTokenizer.from_folder(path)
    if path.suffix.lower() == ".gguf" and path.is_file():
        from pagedinfer.model.gguf_header import read_header

        return TextTokenizer.from_gguf(read_header(path).metadata)
    raise ModelError(f'"{path}" is neither a model folder nor a .gguf file, so it has no tokenizer')


def _stop_training(backend: Any) -> None:
    """Switch off what belongs to training: prompts are neither cut, nor filled up, nor split at random."""
    backend.no_truncation()
    backend.no_padding()
    if getattr(backend.model, "dropout", None):
        backend.model.dropout = None


def _begins_with(backend: Any, bos_token_id: int | None) -> bool:
    """Find out whether the backend itself puts the begin token before a prompt, by asking it."""
    with _guarded("the tokenizer does not work", ModelError):
        backend.decode([0])
        ids = backend.encode("", add_special_tokens=True).ids
    return bool(ids) and ids[0] == bos_token_id


def _bad_byte(backend: Any) -> int | None:
    """A token of one byte that is no character alone, where the decoder makes bytes of tokens written <0xNN>."""
    ids = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(0xFF, 0x7F, -1))
    return next((found for found in ids if found is not None and backend.decode([found]) == "\ufffd"), None)


def _special_names(config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens in `tokenizer_config.json`: each a text, or an object with `content`."""
    names = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token"):
        value = config.get(key)
        if value:
            value = value.get("content") if isinstance(value, Mapping) else value
            names[key] = text_of(value, f"{key} in tokenizer_config.json")
    return names


def _folder_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """Find the chat template: a file of its own wins over the entry in `tokenizer_config.json`."""
    file = path / "chat_template.jinja"
    if file.exists():
        return read_text(file)
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = [item for item in template if isinstance(item, Mapping) and item.get("name") == "default"]
        template = named[-1].get("template") if named else None
    return None if template is None else text_of(template, "chat_template in tokenizer_config.json")


def _optional_json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


@contextlib.contextmanager
def _guarded(what: str, kind: type[PagedInferError]) -> Iterator[None]:
    """Turn what the `tokenizers` package raises into `kind`: plain exceptions, and panics of its Rust code."""
    try:
        yield
    except PagedInferError:
        raise
    except BaseException as error:
        # A panic is no Exception, but neither are Ctrl-C and exit, which must go on.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what} ({printable(str(error))})") from error
