"""Text to ids and back, and chat templates, from a model's own files: a folder or GGUF metadata.

Tokenization itself is the `tokenizers` package's; this module hands it the right parts. A prompt gets exactly
one begin token, also when the text was rendered from a chat template that already holds it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pagedinfer.errors import ModelError, RequestError
from pagedinfer.model.config_fields import eos_ids

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
        self.special_token_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        for flag, token_id, what in ((add_bos, bos_token_id, "begin"), (add_eos, eos_token_id, "end")):
            if flag and token_id is None:
                raise ModelError(f"the tokenizer asks for a {what} token on each prompt but names none")
        self._backend_decides = add_bos is None
        self._add_bos = _begins_with(backend, bos_token_id) if add_bos is None else add_bos
        self._add_eos = add_eos
        self._template_tokens = dict(template_tokens or {})
        for name, token_id in (("bos_token", bos_token_id), ("eos_token", eos_token_id)):
            if token_id is not None:
                self._template_tokens[name] = backend.id_to_token(token_id)

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
        try:
            backend = Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises plain Exception
            raise ModelError(f'"{file}" cannot be read ({error})') from error
        config = _optional_json(path / "tokenizer_config.json")
        models = [_optional_json(path / name) for name in ("config.json", "generation_config.json")]
        names = {
            key: value["content"] if isinstance(value, Mapping) else value
            for key, value in config.items()
            if key in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token") and value
        }
        ids = {key: backend.token_to_id(name) for key, name in names.items()}
        bos = ids.get("bos_token")
        if bos is None:
            bos = next(
                (item["bos_token_id"] for item in models if item.get("bos_token_id") is not None), None
            )
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

        backend = build_backend(metadata)
        own = {
            key.removeprefix("tokenizer.ggml."): value
            for key, value in metadata.items()
            if key.startswith("tokenizer.ggml.")
        }
        add_bos = own.get("add_bos_token")
        names = {"pad_token": own.get("padding_token_id"), "unk_token": own.get("unknown_token_id")}
        return cls(
            backend,
            vocab_size=len(own["tokens"]),
            bos_token_id=own.get("bos_token_id"),
            eos_token_id=own.get("eos_token_id"),
            eos_token_ids=eos_ids(own.get("eot_token_id"), own.get("eom_token_id")),
            add_bos=default_add_bos(metadata) if add_bos is None else bool(add_bos),
            add_eos=bool(own.get("add_eos_token", False)),
            chat_template=metadata.get("tokenizer.chat_template"),
            template_tokens={name: own["tokens"][at] for name, at in names.items() if at is not None},
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. Special tokens written in the text become their ids.

        With `add_special_tokens` the prompt gets the begin (and end) token that the model expects, unless the
        text brings it along already.
        """
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        if not add_special_tokens:
            return ids
        has_bos = bool(ids) and ids[0] == self.bos_token_id
        if self._backend_decides:
            ids = self.backend.encode(text, add_special_tokens=True).ids
            return ids[1:] if has_bos and self._add_bos else ids
        if self._add_bos and self.bos_token_id is not None and not has_bos:
            ids.insert(0, self.bos_token_id)
        if self._add_eos and self.eos_token_id is not None and ids[-1:] != [self.eos_token_id]:
            ids.append(self.eos_token_id)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are no text become the replacement mark U+FFFD."""
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
        import jinja2

        if self.chat_template is None:
            raise ModelError(
                "this model has no chat template; write the whole prompt as text and use generate"
            )
        for message in messages:
            if not {"role", "content"} <= message.keys():
                raise RequestError(f'a message has {sorted(message)}; it needs "role" and "content"')
        try:
            template = _template_environment().from_string(self.chat_template)
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template is not valid Jinja: {error}") from error
        try:
            text: str = template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._template_tokens,
            )
        except jinja2.TemplateError as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}") from error
        return text


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


def _begins_with(backend: Any, bos_token_id: int | None) -> bool:
    """Find out whether the backend itself puts the begin token before a prompt, by asking it."""
    ids = backend.encode("", add_special_tokens=True).ids
    return bool(ids) and ids[0] == bos_token_id


def _template_environment() -> Any:
    """Build the Jinja environment that chat templates are written for.

    Its settings and functions are those that transformers documents for templates; it is sandboxed, since a
    template comes with the model.
    """
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    def tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment


def _folder_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """Find the chat template: a file of its own wins over the entry in `tokenizer_config.json`."""
    file = path / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {item["name"]: item["template"] for item in template}.get("default")
    return template


def _optional_json(file: Path) -> dict[str, Any]:
    from pagedinfer.model.checked import read_json

    return read_json(file) if file.exists() else {}
