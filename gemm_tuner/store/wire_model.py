"""What the models of the JSON form of a record are made of: their parent, and types of members."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_LINE = 1000

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Line = Annotated[str, Field(max_length=MAX_LINE)]
Number = Annotated[int, Field(ge=0, lt=2**31)]
Bytes = Annotated[int, Field(ge=0, lt=2**53)]


class WireModel(BaseModel):
    """The parent of all models: strict, closed and finite."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        defer_build=True,  # most questions need none of them
    )
