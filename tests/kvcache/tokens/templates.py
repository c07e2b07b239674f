"""Chat templates of the kinds in use, written for these tests, and chats to render with them."""

from __future__ import annotations

import json
from random import Random
from typing import Any

CHATML = """\
{%- if tools %}{{ '<|im_start|>system\\nTools:' }}{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}\
{{ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}{{ message.content }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

THINKING = """\
{%- set ns = namespace(last=messages | length - 1, looking=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.looking and message.role == 'user' %}
        {%- set ns.looking = false %}{% set ns.last = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- set thought = message.reasoning_content or '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if thought and loop.index0 > ns.last %}{{ '<think>\\n' + thought + '\\n</think>\\n' }}{% endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + call.function.name + (call.function.arguments | tojson) + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

ALTERNATING = """\
{%- set turns = messages if messages[0].role != 'system' else messages[1:] %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message.role not in ('tool',) and (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate: user, assistant, user, ...') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {%- if loop.last and tools %}{{ '<|im_start|>tools ' + (tools | tojson) + '<|im_end|>' }}{% endif %}
        {{- '<|im_start|> ' + message.content + '<|im_end|>' }}
    {%- else %}{{ ' ' + message.content + eos_token }}{% endif %}
{%- endfor %}
"""

PARTS = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['content'] is string %}{{ message['content'] }}{% else %}
        {%- for part in message['content'] %}{{ part['text'] | trim }}{% endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

DATED = "{{- '<|im_start|>system\\nToday is ' + strftime_now('%d %b %Y') + '<|im_end|>\\n' }}" + CHATML

COUNTING = CHATML.replace("{{- '<|im_start|>' + message.role", "{{- '<|im_start|>' + loop.index|string + message.role")
"""Not local: a message's text depends on how many stand before it."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{n}",
            "description": f"Does <{n}> & more, 'quoted'",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
    for n in range(3)
]


def agent_chat(random: Random, rounds: int, *, words: int = 40, reasoning: bool = False) -> list[dict[str, Any]]:
    """A coding agent's session: system, user, then rounds of tool calls and results, at times an answer."""

    def text(count: int) -> str:
        return " ".join(random.choice(_WORDS) for _ in range(random.randrange(1, count)))

    chat: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a coding agent. " + text(words)},
        {"role": "user", "content": text(words)},
    ]
    for number in range(rounds):
        message: dict[str, Any] = {"role": "assistant", "content": text(words)}
        if reasoning:
            message["reasoning_content"] = text(words)
        if random.random() < 0.75:
            count = random.choice((1, 1, 2))
            message["tool_calls"] = [
                {
                    "id": f"call_{number}_{i}",
                    "type": "function",
                    "function": {"name": "tool_0", "arguments": json.dumps({"path": text(6)})},
                }
                for i in range(count)
            ]
            chat.append(message)
            chat += [
                {"role": "tool", "tool_call_id": f"call_{number}_{i}", "content": text(words * 3)} for i in range(count)
            ]
        else:
            chat += [message, {"role": "user", "content": text(words)}]
    return chat


_WORDS = [
    *("def", "return", "self", "import", "the", "of", "and", "is", "not", "file", "line", "error", "0x1F", "42", "'x'"),
    *('{"a":', "1}", "<div>", "naïve", "世界", "😀", "\n", "\n\n", "\t"),
]
