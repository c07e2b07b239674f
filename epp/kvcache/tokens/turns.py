"""A chat that goes on: the text of its new messages, without rendering the old ones again.

A template is a program over all messages, so nothing guarantees that one more message only adds text. Nearly always it
does, but for known cases (reasoning of earlier turns is dropped once the user speaks again; tools stand before the last
user message). So the new text is taken from a *short* chat: the leading system messages, the last user message, the
last round, and then what is new. What the short chat adds is what the long one adds if

1. with the new messages the short chat still begins with all that it was without them (but for the prompt to answer,
   which the answer replaces), and its end is the very pieces that the long one ended with (checked every time), and
2. the template is *local* for chats of this shape: messages that were left out neither change nor are changed by what
   comes later. `Locality` proves it by example before it is relied on: random chats of the same shapes (who speaks
   after whom, with tool calls, reasoning, parts ... and the strings that the template looks for) must come out equal
   both ways. Every 64th answer is compared with a whole rendering after that, and one difference ends it.

Once there is reasoning in a chat, a user who speaks again is never taken the short way: that is what makes templates
drop it.

Where either fails the whole chat is rendered: the same ids, in 4-6 ms for 400 KB instead of 0.6
(`bench/tokens_micro.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from threading import Lock
from typing import Any

from epp.kvcache.tokens.growing import GrowingIds
from epp.kvcache.tokens.messages import Message
from epp.kvcache.tokens.pieces import Cutter, Ids
from epp.kvcache.tokens.template import ChatTemplate, TemplateError

TAIL = 8
"""Pieces of a prompt's end that are kept as text, to see how far the next turn still agrees."""
TURN_BYTES = 2_000
"""What a remembered turn costs beside its ids and its texts."""

_ANOTHER_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {"name": "another", "description": "another", "parameters": {"type": "object", "properties": {}}},
}

Shape = tuple[str, ...]
"""What a template may look at in a message besides its words: the role, and marks of what it holds."""
Edges = frozenset[tuple[Shape | None, Shape]]
"""Which shape follows which in a chat; None stands before the first."""

Render = Callable[[Sequence[Message]], str]


@dataclass(frozen=True, slots=True)
class Short:
    """A chat without its middle."""

    lead: tuple[Message, ...]
    user: tuple[Message, ...]
    """The last user message, unless it is in the round or there is none."""
    round: tuple[Message, ...]
    """The last assistant message and all after it; all messages after the lead when there is none."""

    @property
    def messages(self) -> list[Message]:
        return [*self.lead, *self.user, *self.round]

    @classmethod
    def of(cls, messages: Sequence[Message]) -> Short:
        start = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
        last = next((i for i in range(len(messages) - 1, start - 1, -1) if messages[i]["role"] == "assistant"), start)
        user = next((messages[i] for i in range(last - 1, start - 1, -1) if messages[i]["role"] == "user"), None)
        return cls(tuple(messages[:start]), () if user is None else (user,), tuple(messages[last:]))


def continue_text(
    render: Render, cutter: Cutter, short: Short, tail: Sequence[str], new: Sequence[Message], generation: str
) -> tuple[int, str] | None:
    """How many pieces at the end of the old text fall away, and the text that comes instead; None: cannot tell.

    `generation`: the prompt to answer at the end of the old text. Raises TemplateError when the template does not take
    the short chat.
    """
    old = short.messages
    before = render(old)
    if not before.endswith(generation):
        return None
    after = render([*old, *new])
    if not after.startswith(before[: len(before) - len(generation)]):
        return None
    cuts = cutter.cut(before)
    still = set(cutter.cut(after))
    end = len(before)
    for count, piece in enumerate(reversed(tail), 1):
        start = cuts.pop() if cuts else 0
        if start == 0 or before[start:end] != piece:
            return None
        if start in still and after.startswith(before[:start]):
            return count, after[start:]
        end = start
    return None


def may_continue(edges: Edges, new: Sequence[Message]) -> bool:
    """False for what is known to change earlier messages: whoever is not the model or a tool, after reasoning."""
    if all(m["role"] in ("assistant", "tool") for m in new):
        return True
    return not any(flag.startswith(("has:reasoning", "mark:")) for _, shape in edges for flag in shape)


def edges_of(messages: Sequence[Message], marks: Sequence[str], previous: Shape | None = None) -> Edges:
    shapes = [shape_of(m, marks) for m in messages]
    return frozenset(zip([previous, *shapes], shapes, strict=False))


def shape_of(message: Message, marks: Sequence[str]) -> Shape:
    content = message["content"]
    texts = [content] if isinstance(content, str) else [p.get("text", "") for p in content]
    found = [message["role"]]
    if not isinstance(content, str):
        found.append("parts" if len(content) < 2 else "many-parts")
        found += sorted({f"part:{p['type']}" for p in content if p["type"] != "text"})
    if not any(texts):
        found.append("empty")
    calls = message.get("tool_calls")
    if calls:
        found.append("call" if len(calls) == 1 else "calls")
    found += sorted(f"has:{name}" for name in message.keys() - {"role", "content", "tool_calls"})
    if isinstance(message.get("reasoning"), str):
        texts.append(message["reasoning"])
    found += [f"mark:{mark}" for mark in marks if any(mark in text for text in texts)]
    return tuple(found)


class Locality:
    """Whether a template is local, by chat shape; learned by example, unlearned by one counter-example."""

    CHATS, NEEDED = 48, 8
    """Chats tried, and how many must come out equal; half as many with messages left out, unless no chat is so long."""
    MAX_KNOWN = 512

    def __init__(self, template: ChatTemplate, cutter: Cutter) -> None:
        self.broken = ""
        """Why the short way is never taken with this template; empty while it may be."""
        if not template.clock_formats_known:
            self.broken = "the template asks the clock in a way that cannot be foreseen"
        self._template, self._cutter = template, cutter
        self._known: OrderedDict[tuple[bytes, Edges], bool] = OrderedDict()
        self._generation: OrderedDict[bytes, str] = OrderedDict()
        self._lock = Lock()

    def known(self, settings: bytes, edges: Edges) -> bool | None:
        """What was found out about chats of this shape under settings of this kind; None = not tried yet."""
        return False if self.broken else self._known.get((settings, edges))

    def holds(self, settings: bytes, edges: Edges, variables: Mapping[str, Any]) -> bool:
        """Find out; takes some milliseconds the first time. `variables`: as for the short chat."""
        known = self.known(settings, edges)
        if known is None:
            known = self._try(settings, edges, variables)
            with self._lock:
                self._known[settings, edges] = known
                while len(self._known) > self.MAX_KNOWN:
                    self._known.popitem(last=False)
        return known

    def generation(self, settings: bytes, variables: Mapping[str, Any]) -> str:
        """The prompt to answer that ends every text under these settings. Raises TemplateError."""
        known = self._generation.get(settings)
        if known is None:
            content = [{"type": "text", "text": "x"}] if self._template.content_format == "openai" else "x"
            chat: list[Message] = [{"role": "user", "content": content}]
            bare = self._template.render(chat, {**variables, "add_generation_prompt": False})
            known = self._template.render(chat, variables).removeprefix(bare)
            with self._lock:
                self._generation[settings] = known
                while len(self._generation) > self.MAX_KNOWN:
                    self._generation.popitem(last=False)
        return known

    def _try(self, settings: bytes, edges: Edges, variables: Mapping[str, Any]) -> bool:
        random = Random(len(edges))
        equal = equal_shortened = longest = 0
        for number in range(self.CHATS):
            chat = _walk(edges, random, length=4 + number % 16)
            longest = max(longest, len(chat))
            seen = edges_of(chat, self._template.marks)
            cuts = [at for at in range(1, len(chat)) if may_continue(seen, chat[at:])]
            if not cuts:
                continue
            at = random.choice(cuts)
            outcome = self._compare(chat[:at], chat[at:], variables, self.generation(settings, variables))
            if outcome is False:
                return False
            equal += outcome is True
            equal_shortened += outcome is True and len(Short.of(chat[:at]).messages) < at
        goes_round = longest >= 8
        return equal >= self.NEEDED and (equal_shortened >= self.NEEDED // 2 or not goes_round)

    def _compare(
        self, old: list[Message], new: list[Message], short: Mapping[str, Any], generation: str
    ) -> bool | None:
        """True: both ways are equal; False: they differ; None: the template refuses this chat, or we cannot tell."""

        def render(messages: Sequence[Message]) -> str:
            return self._template.render(messages, short)

        whole = {**short, "tools": short["tools"] and [*short["tools"], _ANOTHER_TOOL]}
        """So that tools in what is taken for new show up as a difference."""
        try:
            before, after = self._template.render(old, whole), self._template.render([*old, *new], whole)
        except TemplateError:
            return None
        try:
            pieces = self._cutter.pieces(before)
            found = continue_text(render, self._cutter, Short.of(old), pieces[-TAIL:], new, generation)
        except TemplateError:
            return None
        if found is None:
            return None
        dropped, text = found
        return "".join(pieces[:-dropped]) + text == after


def _walk(edges: Edges, random: Random, length: int) -> list[Message]:
    """A chat in which shapes follow each other as in `edges`."""
    follow: dict[Shape | None, list[Shape]] = {}
    for before, after in sorted(edges, key=repr):
        follow.setdefault(before, []).append(after)
    chat: list[Message] = []
    current: Shape | None = None
    while len(chat) < length and current in follow:
        current = random.choice(follow[current])
        chat.append(_example(current, random))
    return chat


def _example(shape: Shape, random: Random) -> Message:
    """A message of a shape, with words that occur nowhere else."""

    def words() -> str:
        return f"w{random.randrange(1 << 30):x} v{random.randrange(1 << 30):x}"

    role, *flags = shape
    marks = [flag[5:] for flag in flags if flag.startswith("mark:")]
    text = "" if "empty" in flags else words() + "".join(f"\n{mark}\n{words()}" for mark in marks)
    message: Message = {"role": role, "content": text}
    if "parts" in flags or "many-parts" in flags:
        count = 2 if "many-parts" in flags else 0 if "empty" in flags else 1
        message["content"] = [{"type": "text", "text": text}, {"type": "text", "text": words()}][:count]
        message["content"] += [{"type": flag[5:], "name": words()} for flag in flags if flag.startswith("part:")]
    calls = {"call": 1, "calls": 2}.get(next((flag for flag in flags if flag.startswith("call")), ""), 0)
    if calls:
        message["tool_calls"] = [
            {"id": words(), "function": {"arguments": {words(): words()}, "name": words()}, "type": "function"}
            for _ in range(calls)
        ]
    for flag in flags:
        if flag.startswith("has:"):
            message[flag[4:]] = None if flag == "has:tools" else words()
    if "reasoning" in message:
        message["reasoning_content"] = message["reasoning"]
    return message


@dataclass(frozen=True, slots=True)
class Turn:
    """A chat as it was last asked, and its ids."""

    buffer: GrowingIds
    length: int
    """Its ids are the first `length` of the buffer."""
    tail: tuple[str, ...]
    """The last pieces of its text, and how many ids each has."""
    lengths: tuple[int, ...]
    short: Short
    edges: Edges
    shape: Shape
    """Of its last message."""
    notes: dict[object, object] = field(default_factory=dict)
    """Room for what others compute along the ids (block keys); shared by nobody else."""

    @property
    def ids(self) -> Ids:
        return self.buffer.view(self.length)

    @property
    def nbytes(self) -> int:
        """Beside the buffer."""
        texts = sum(len(str(m["content"])) for m in self.short.messages) + sum(map(len, self.tail))
        return texts + TURN_BYTES


class Turns:
    """The chats seen, by the name of everything up to their last message; bounded in bytes, oldest use first out."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._turns: OrderedDict[bytes, Turn] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._turns)

    def longest(self, names: Sequence[bytes]) -> tuple[int, Turn] | None:
        """The last of `names` (one per message) that is known: its place, and the turn."""
        with self._lock:
            for index in range(len(names) - 1, -1, -1):
                turn = self._turns.get(names[index])
                if turn is not None:
                    self._turns.move_to_end(names[index])
                    return index, turn
        return None

    def keep(self, name: bytes, turn: Turn) -> None:
        with self._lock:
            old = self._turns.pop(name, None)
            self._turns[name] = turn
            self.bytes += turn.nbytes
            turn.buffer.holders += 1
            if turn.buffer.holders == 1:
                self.bytes += turn.buffer.nbytes
            if old is not None:
                self._forget(old)
            while self.bytes > self.max_bytes and self._turns:
                self._forget(self._turns.popitem(last=False)[1])

    def _forget(self, turn: Turn) -> None:
        self.bytes -= turn.nbytes
        turn.buffer.holders -= 1
        if not turn.buffer.holders:
            self.bytes -= turn.buffer.nbytes
