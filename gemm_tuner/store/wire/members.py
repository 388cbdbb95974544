"""Types of members in the JSON form of a record."""

from typing import Annotated

from pydantic import Field

MAX_LINE = 1000

Line = Annotated[str, Field(max_length=MAX_LINE)]
Number = Annotated[int, Field(ge=0, lt=2**31)]
Bytes = Annotated[int, Field(ge=0, lt=2**53)]
