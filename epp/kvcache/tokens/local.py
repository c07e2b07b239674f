"""Prompts tokenised in this process: the model's own template and tokenizer, paying only for what is new.

In: body bytes. Out: `Prompt`s whose ids equal the worker's, or `Unrenderable` with the reason. A chat whose beginning
was seen before costs its new messages (see `epp.kvcache.tokens.turns`); every other text costs what of its pieces is
not in the cache. With `quick=True` the answer is given only when it costs well under a millisecond, else None: that
call may be made on the event loop, the other belongs in a thread (rendering holds the GIL, encoding does not).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
import xxhash
from msgspec import Raw

from epp.api.fields import span_of
from epp.kvcache.tokens.bodies import ChatSettings, SettingsReader, read_chat, read_completion
from epp.kvcache.tokens.encoder import Encoder
from epp.kvcache.tokens.folder import ModelFolder
from epp.kvcache.tokens.growing import GrowingIds
from epp.kvcache.tokens.messages import Message, Unrenderable, conversation, without_developer
from epp.kvcache.tokens.pieces import Ids, PieceCache
from epp.kvcache.tokens.resume import Bodies, Earlier, without_known
from epp.kvcache.tokens.template import ChatTemplate, TemplateError
from epp.kvcache.tokens.turns import (
    TAIL,
    Edges,
    Locality,
    Shape,
    Short,
    Turn,
    Turns,
    continue_text,
    edges_of,
    may_continue,
    shape_of,
)

QUICK_BYTES = 32_768
"""New messages that are read and rendered on the event loop."""
QUICK_CHARS_FAST, QUICK_CHARS_SLOW = 12_000, 1_500
"""Text that is encoded there, with and without tiktoken: each about 0.4 ms."""
AUDIT_EVERY = 64


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt's ids."""

    ids: Ids
    shared: int = 0
    """So many of the first ids are those of an earlier turn, whose notes are `earlier`."""
    earlier: dict[object, object] | None = None
    notes: dict[object, object] = field(default_factory=dict)
    """Kept with this turn: the `earlier` of the next one."""


@dataclass(slots=True)
class Counts:
    """How prompts came about, for metrics."""

    short: int = 0
    """Chats of which only new messages were rendered."""
    whole: int = 0
    """Chats and completions that were rendered and cut as a whole."""
    audits: int = 0
    audits_failed: int = 0


class LocalModel:
    """One model's prompts. Safe from several threads. Raises ModelFolderError."""

    def __init__(
        self,
        folder: ModelFolder,
        cache: PieceCache,
        turns: Turns,
        *,
        template_defaults: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        self.encoder = Encoder(folder, cache)
        self.counts = Counts()
        self._turns = turns
        self._seed = seed
        self._bodies = Bodies(seed)
        self._settings = SettingsReader(folder.special_tokens, template_defaults)
        self._templates: dict[str, ChatTemplate] = {}
        self._locality: dict[str, Locality] = {}
        self.no_chat = f"chats are rendered by {folder.renderer}" if folder.renderer else ""
        """Why chats cannot be rendered here; empty when they can."""
        if not folder.templates:
            self.no_chat = self.no_chat or "the model has no chat template"
        for name, source in folder.templates.items():
            try:
                template = self._templates[name] = ChatTemplate(source)
            except TemplateError as error:
                self.no_chat = f"chat template {name}: {error}"
                continue
            self._locality[name] = Locality(template, self.encoder.cutter)

    def completion(self, body: bytes, *, quick: bool = False) -> list[Prompt] | None:
        """Raises Unrenderable."""
        if quick and len(body) > QUICK_BYTES:
            return None
        texts, special = read_completion(body)
        if quick and not self._is_quick([piece for text in texts for piece in self._pieces(text)]):
            return None
        self.counts.whole += 1
        return [Prompt(self._encode(text, special)) for text in texts]

    def chat(self, body: bytes, *, quick: bool = False) -> Prompt | None:
        """Raises Unrenderable."""
        if self.no_chat:
            raise Unrenderable("no-template", self.no_chat)
        prompt = self._resumed(body, quick=quick)
        if prompt is None:
            members = read_chat(body)
            settings = self._settings.read(members)
            chat = _Chat(self, self._template_for(settings), settings, members.messages, body, body)
            prompt = chat.from_earlier_turn(quick=quick)
            if prompt is None and not quick:
                prompt = chat.whole()
        return prompt

    def _resumed(self, body: bytes, *, quick: bool) -> Prompt | None:
        """When an earlier body's messages are the first of this one: read what is behind them only."""
        earlier = self._bodies.find(body)
        shorter = without_known(body, earlier) if earlier else None
        if earlier is None or shorter is None:
            return None
        try:
            members = read_chat(shorter)
            settings = self._settings.read(members)
        except Unrenderable:
            return None  # reading the whole says why
        raw = members.messages
        span = span_of(shorter, raw[0])
        if span is None or shorter[earlier.opening : span[0]].strip():
            return None  # these are the messages of a second member of that name
        if bytes(raw[0]) == b"null":
            raw = []
        chat = _Chat(self, self._template_for(settings), settings, raw, body, shorter, earlier)
        return chat.from_earlier_turn(quick=quick) if chat.root == earlier.root else None

    def _template_for(self, settings: ChatSettings) -> str:
        name = "tool_use" if settings.variables["tools"] and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise Unrenderable("no-template", f"there is no chat template named {name}")
        return name

    def _pieces(self, text: str) -> list[str]:
        return self.encoder.cutter.pieces(text) if self.encoder.exact_pieces else [text] if text else []

    def _is_quick(self, pieces: Sequence[str]) -> bool:
        limit = QUICK_CHARS_SLOW if self.encoder.slow_because else QUICK_CHARS_FAST
        return sum(map(len, pieces)) <= limit or self.encoder.uncached(pieces) <= limit

    def _encode(self, text: str, special: bool) -> Ids:
        try:
            return self.encoder.encode(text, add_special_tokens=special)
        except UnicodeEncodeError:
            raise Unrenderable("bad-message", "half a surrogate pair is no text") from None


class _Chat:
    """One request for a chat: `raw` are its messages, or those behind an earlier body's."""

    def __init__(
        self,
        model: LocalModel,
        template: str,
        settings: ChatSettings,
        raw: Sequence[Raw],
        body: bytes,
        source: bytes,
        earlier: Earlier | None = None,
    ) -> None:
        """`source`: where `raw` lie; `body`, but for what it shares with an earlier one."""
        self._model, self._settings, self._raw = model, settings, raw
        self._body, self._source, self._earlier = body, source, earlier
        self._template = model._templates[template]
        self._locality = model._locality[template]
        clock = self._template.clock(datetime.now())
        self.root = settings.digest + f"{id(model)}:{template}:{clock}".encode()
        """All but the messages that decides about the ids."""
        self._names, self._naming = self._name_messages()

    def _name_messages(self) -> tuple[list[bytes], Any]:
        """A name for the chat up to each message, over the root and all messages so far."""
        names = []
        if self._earlier is None:
            digest = xxhash.xxh3_128(self.root, self._model._seed)
        else:
            digest = self._earlier.naming.copy()
            names.append(self._earlier.name)
        for raw in self._raw:
            digest.update(raw)
            digest.update(b"\0")
            names.append(digest.digest())
        return names, digest

    def from_earlier_turn(self, *, quick: bool) -> Prompt | None:
        """The short way; None when there is none, or it is not quick enough."""
        model, settings = self._model, self._settings
        if settings.continued or settings.add_special_tokens or not model.encoder.exact_pieces:
            return None
        found = model._turns.longest(self._names)
        if found is None:
            return None
        index, turn = found
        raw = self._raw[index + 1 - len(self._names) + len(self._raw) :]
        if index + 1 == len(self._names):
            return Prompt(turn.ids, turn.length, turn.notes, turn.notes)
        if quick and sum(len(memoryview(r)) for r in raw) > QUICK_BYTES:
            return None
        new = self._read(raw)
        edges = turn.edges | edges_of(new, self._template.marks, turn.shape)
        if not may_continue(edges, new) or any(m["role"] == "developer" for m in new):
            return None
        try:
            if not (self._locality.known(settings.kind, edges) if quick else self._holds(edges)):
                return None
            generation = self._locality.generation(settings.kind, settings.short_variables)
            step = continue_text(self._render_short, model.encoder.cutter, turn.short, turn.tail, new, generation)
        except TemplateError:
            return None
        if step is None:
            return None
        dropped, text = step
        pieces = model.encoder.cutter.pieces(text)
        if quick and not model._is_quick(pieces):
            return None
        audit = (model.counts.short + 1) % AUDIT_EVERY == 0
        if audit and (quick or self._earlier is not None):
            return None  # the whole body is needed
        model.counts.short += 1
        kept = turn.length - sum(turn.lengths[-dropped:])
        parts = self._encode(pieces)
        buffer, length = turn.buffer.continued(turn.length, kept, parts)
        prompt = Prompt(buffer.view(length), kept, turn.notes)
        if audit and not self._audit(prompt):
            return None
        tail = [*zip(turn.tail[:-dropped], turn.lengths[:-dropped], strict=True)]
        tail += zip(pieces, map(len, parts), strict=True)
        self._keep(
            prompt, buffer, tail, Short.of([*turn.short.messages, *new]), edges, shape_of(new[-1], self._template.marks)
        )
        return prompt

    def whole(self) -> Prompt:
        """Everything rendered; only pieces not in the cache are encoded."""
        model, settings = self._model, self._settings
        messages = self._read(self._raw)
        model.counts.whole += 1
        turned = messages if self._template.knows_developer else without_developer(messages)
        render = self._template.render_continued if settings.continued else self._template.render
        try:
            text = render(turned, settings.variables)
        except TemplateError as error:
            raise Unrenderable("template-refused", str(error)) from None
        if settings.add_special_tokens:
            return Prompt(model._encode(text, True))
        pieces = model._pieces(text)
        parts = self._encode(pieces)
        buffer = GrowingIds(parts)
        prompt = Prompt(buffer.view(len(buffer)))
        if model.encoder.exact_pieces and not settings.continued and turned is messages:
            tail = [*zip(pieces[-TAIL:], map(len, parts[-TAIL:]), strict=True)]
            marks = self._template.marks
            self._keep(
                prompt, buffer, tail, Short.of(messages), edges_of(messages, marks), shape_of(messages[-1], marks)
            )
        return prompt

    def _read(self, raw: Sequence[Raw]) -> list[Message]:
        try:
            parsed = [json.loads(bytes(r)) for r in raw]
        except (ValueError, RecursionError):
            raise Unrenderable("unreadable-body") from None
        return conversation(parsed, self._template.content_format)

    def _holds(self, edges: Edges) -> bool:
        return self._locality.holds(self._settings.kind, edges, self._settings.short_variables)

    def _render_short(self, messages: Sequence[Message]) -> str:
        return self._template.render(messages, self._settings.short_variables)

    def _encode(self, pieces: Sequence[str]) -> list[Ids]:
        try:
            return self._model.encoder.encode_pieces(pieces)
        except UnicodeEncodeError:
            raise Unrenderable("bad-message", "half a surrogate pair is no text") from None

    def _keep(
        self,
        prompt: Prompt,
        buffer: GrowingIds,
        tail: Sequence[tuple[str, int]],
        short: Short,
        edges: Edges,
        shape: Shape,
    ) -> None:
        texts, lengths = zip(*tail[-TAIL:], strict=True) if tail else ((), ())
        turn = Turn(buffer, len(prompt.ids), tuple(texts), tuple(lengths), short, edges, shape, prompt.notes)
        self._model._turns.keep(self._names[-1], turn)
        self._remember_body()

    def _remember_body(self) -> None:
        body, source = self._body, self._source
        first, last = span_of(source, self._raw[0]), span_of(source, self._raw[-1])
        if first is None or last is None:
            return
        opening = self._earlier.opening if self._earlier else first[0]
        end = last[1] + len(body) - len(source)
        bodies = self._model._bodies
        digest = bodies.digest(body, end)
        bodies.remember(body, Earlier(opening, end, digest, self.root, self._names[-1], self._naming))

    def _audit(self, prompt: Prompt) -> bool:
        """Compare with a whole rendering; a difference ends the short way for this template."""
        counts = self._model.counts
        counts.audits += 1
        if np.array_equal(self.whole().ids, prompt.ids):
            return True
        counts.audits_failed += 1
        self._locality.broken = "a whole rendering gave other ids than the short one"
        return False
