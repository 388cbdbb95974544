"""Text that others wrote, as a terminal, a log or a message may show it."""

# It could else move the cursor, or speak for gemm-tuner.
_CONTROLS = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"
}
# Nobody sees these: they turn the direction of text, break lines, or join words.
UNSEEN = {
    code: f"\\u{code:04x}"
    for code in (
        0x61C,
        *range(0x200B, 0x2010),
        *range(0x2028, 0x202F),
        *range(0x2060, 0x2070),
        0xFEFF,
    )
}
# In the cell of a table or in a log, it would be a row that nobody wrote.
LINE_BREAK = {ord("\n"): "\\n"}

_MAX_QUOTED = 1000


def harmless(text: str) -> str:
    r"""Return `text` with what cannot be seen spelled: `\x1b` for the escape of a terminal."""
    return text.translate(_CONTROLS | UNSEEN)


def quoted(text: str) -> str:
    """Return `text` as a message quotes it: harmless, on one line, cut where it is long."""
    cut = text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}..."
    return harmless(cut).translate(LINE_BREAK)
