"""Texts on which a tokenizer's short cuts must prove themselves before they are used.

Deterministic: prose and code in several scripts, all sorts of white space, numbers and punctuation at the edges where
tokenizers differ, special tokens in every position (adjacent, inside words, after white space), and random mixtures.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

TEXTS = (
    "",
    " ",
    "\n",
    "a",
    "Hello, world! It's 3:45pm; we've won 1,234,567.89 points -- don't you'll see?",
    "def f(x: int) -> str:\n    return f\"{x!r}\\n\"  # 'quoted'\n\n\n\tif x >= 0x1F and not y:\n\t\tpass\r\n",
    '{"path": "/usr/lib/python3.11", "args": ["-c", "1e-9"], "nested": {"a": null, "b": [true, false]}}',
    "<html><body class='x'>&amp;&nbsp;</body></html>\n```bash\n$ ls -la | grep '^d' >> out.txt 2>&1\n```\n",
    "    indented\n\n\n\n        more   spaces   \t\t tabs \u00a0nbsp\u3000wide\u2028line   \n   ",
    "Größe, naïve café, façade; cafe\u0301 e\u0301 A\u030a \u1e9b\u0323 Ångström; ñandú ŒUVRE ŁÓDŹ ﬁ ½ ² Ⅷ",
    "Привет, мир! Ελληνικά ¿Qué? שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก 한국어 문장입니다.",
    "你好，世界！今天是2026年12月1日。日本語のテキスト、カタカナとひらがな。「引用」……",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 ✓ → ∑∫√ \u200b\u200d\ufeff \U0001f1e9\U0001f1ea \x00\x07\x1b[0m \ufffd",
    "A" * 70 + "aaaa" * 40 + "0" * 50 + "=" * 80 + "-" * 33 + "\n" * 12 + " " * 65 + "x",
    "CamelCaseIdentifier snake_case_name SCREAMING_CASE kebab-case dotted.name.v2 a1b2c3 I'M YOU'RE he'S",
)

ALPHABETS = (
    "abcdefghij ABC",
    "0123456789.,",
    " \n\t\r",
    "!?'\"-_=+/\\<>|[]{}()#@",
    "éüßñçàœ",
    "жщыя",
    "你好世界的",
    "한국",
    "عرب",
    "😀🏽‍",
)


def samples(special: Sequence[str], *, seed: int = 1, count: int = 150) -> list[str]:
    """About 100 KB of text; `special` are the texts of added tokens, some of which are strewn in."""
    random = Random(seed)
    tokens = list(special) if len(special) <= 40 else random.sample(list(special), 40)
    words = [word for text in TEXTS for word in text.split(" ") if word]
    made = list(TEXTS)
    for _ in range(count):
        parts: list[str] = []
        for _ in range(random.randrange(2, 14)):
            choice = random.random()
            if choice < 0.3 and tokens:
                parts.append(random.choice(tokens))
            elif choice < 0.55:
                parts.append(" ".join(random.choices(words, k=random.randrange(1, 12))))
            elif choice < 0.75:
                parts.append(random.choice(TEXTS))
            else:
                alphabet = "".join(random.sample(ALPHABETS, k=random.choice((1, 1, 2, 3))))
                parts.append("".join(random.choices(alphabet, k=random.randrange(1, 60))))
        made.append("".join(parts))
    return made
