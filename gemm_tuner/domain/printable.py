"""Text that others wrote, as a terminal, a log or a message may show it."""

from json import dumps

# It could else move the cursor, or speak for gemm-tuner.
_CONTROLS = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"
}
# Nobody sees these: they turn the direction of text, break lines, join words, or fill a place.
# fmt: off
_UNSEEN_RANGES = (
    (0x2028, 0x202E), (0xFFF9, 0xFFFB),  # separators, and what annotates a text
    # Default_Ignorable_Code_Point in DerivedCoreProperties.txt of Unicode 15.0
    (0xAD, 0xAD), (0x34F, 0x34F), (0x61C, 0x61C), (0x115F, 0x1160), (0x17B4, 0x17B5),
    (0x180B, 0x180F), (0x200B, 0x200F), (0x2060, 0x206F), (0x3164, 0x3164), (0xFE00, 0xFE0F),
    (0xFEFF, 0xFEFF), (0xFFA0, 0xFFA0), (0xFFF0, 0xFFF8), (0x1BCA0, 0x1BCA3),
    (0x1D173, 0x1D17A), (0xE0000, 0xE0FFF),
)
# fmt: on
# Spelled as JSON spells them.
UNSEEN = {
    code: dumps(chr(code))[1:-1]
    for first, last in _UNSEEN_RANGES
    for code in range(first, last + 1)
}
_SPELLED = _CONTROLS | UNSEEN
# In the cell of a table or in a log, it would be a row that nobody wrote.
LINE_BREAK = {ord("\n"): "\\n"}

_MAX_QUOTED = 1000
_MAX_VALUE = 60


def harmless(text: str) -> str:
    r"""Return `text` with what cannot be seen spelled: `\x1b` for the escape of a terminal."""
    return text.translate(_SPELLED)


def quoted(text: str) -> str:
    """Return `text` as a message quotes it: harmless, on one line, cut where it is long."""
    cut = text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}..."
    return harmless(cut).translate(LINE_BREAK)


def value_text(value: object) -> str:
    """Return a value that a caller gave as a message shows it: on one short line."""
    try:
        text = harmless(repr(value)).translate(LINE_BREAK)
    except ValueError:  # Python does not write an integer of thousands of digits
        return f"a long {type(value).__name__}"
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}..."
