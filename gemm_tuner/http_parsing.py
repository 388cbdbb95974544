"""HTTP/1.1 as h11 parses it, in a time that grows with the length of a line and no faster.

Two patterns of h11 try each way to cut a run of blanks in two, so that twice as many take four
times as long: a head of 60 kB keeps a process for seconds. Importing this module puts patterns in
their place that match the same.
"""

import re

from h11 import _readers

# The name of a pattern, what is slow in it, and what matches the same with each blank in one place.
_FASTER = (
    # No value begins with a blank: those behind the colon are never given back.
    ("header_field_re", rb":[ \t]*", rb":[ \t]*+"),
    # The blanks behind an extension are part of it.
    ("chunk_header_re", rb"(?P<chunk_ext>;.*)?[ \t]*", rb"(?:(?P<chunk_ext>;.*)|[ \t]*)"),
)

for _name, _slow, _fast in _FASTER:
    _known = getattr(_readers, _name, None)
    if isinstance(_known, re.Pattern):  # of a later h11 that has none, a test of ours tells
        setattr(_readers, _name, re.compile(_known.pattern.replace(_slow, _fast)))
