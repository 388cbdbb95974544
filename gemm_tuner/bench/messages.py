"""Messages from processes that a kernel may have taken over: data, and never code.

A pickle may name any function for its reader to call. Here it may name what answers are made of:
the frozen dataclasses, enums and errors of this package.
"""

import io
import pickle
import sys
from dataclasses import is_dataclass
from enum import Enum, EnumType
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, cast

from gemm_tuner.errors import GemmTunerError, TrialFailed

_MOST_BYTES = 256 << 20
_PACKAGE = "gemm_tuner."
_PLAIN = frozenset({("builtins", "frozenset"), ("builtins", "set")})


def send(connection: Connection, message: object) -> None:
    """Send a message by what its class says of itself.

    Libraries may teach `pickle` other ways to write errors, for the whole process; `receive` takes
    none of these.
    """
    content = io.BytesIO()
    pickler = pickle.Pickler(content)
    pickler.dispatch_table = {}
    pickler.dump(message)
    connection.send_bytes(content.getbuffer())


def receive(connection: Connection) -> object:
    """Return the next message.

    Raises:
        EOFError: the other end is closed.
        TrialFailed: the message is none of ours.
    """
    try:
        content = connection.recv_bytes(_MOST_BYTES)
    except EOFError:
        raise
    except OSError as error:
        raise EOFError(f"the message cannot be read: {error}") from error
    try:
        return _Reader(io.BytesIO(content)).load()
    except Exception as error:
        raise TrialFailed(f"a trial sent what is no answer: {error!r:.200}") from error


class _Reader(pickle.Unpickler):
    """Makes objects of these classes, and changes no class.

    A pickle may set attributes of whatever it named. A frozen dataclass with slots and an error
    take these by a method of theirs, which wants an object.
    """

    def find_class(self, module_name: str, global_name: str, /) -> object:
        """Return what makes objects of a class that an answer may be made of."""
        if (module_name, global_name) == ("builtins", "getattr"):
            return partial(_member)
        if (module_name, global_name) in _PLAIN:
            return super().find_class(module_name, global_name)
        module = sys.modules.get(module_name)
        if module_name.startswith(_PACKAGE) and module is not None:
            found = getattr(module, global_name, None)
            if isinstance(found, type) and found.__module__ == module_name:
                if issubclass(found, Enum):
                    return partial(found)
                if issubclass(found, GemmTunerError) or _is_noun(found):
                    return found
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is not part of an answer")


def _member(made_by: object, name: str) -> Enum:
    """Return a member of an enum by its name, as Python 3.11.0 to 3.11.3 writes members.

    Raises:
        pickle.UnpicklingError: that is an attribute of something else.
    """
    made: Any = made_by.func if type(made_by) is partial else None
    if not isinstance(made, EnumType) or name not in made.__members__:
        raise pickle.UnpicklingError("builtins.getattr is not part of an answer")
    return cast("Enum", made[name])


def _is_noun(found: type) -> bool:
    return is_dataclass(found) and "__setstate__" in vars(found)
