"""How much there is to read in a request's body apart from its bytes. Pure.

Reading JSON is one call that holds the interpreter, in a thread as well as here, and the engine's own reading and
checking after it are too: meanwhile no stream of this pod goes on. Characters of a string cost next to nothing, values
up to a microsecond each while they are read. 64 MiB of `{},` would take minutes, so values are bounded before a body is
read. A value that the engine does not want costs ten times as much again: an error for each type that it might have
been, up to fifteen of them, which are all kept and copied. So what can be wrong is bounded before the engine gets it.
Only token ids may be more, and only where every request of the engine takes them or one error for them all.
"""

from array import array
from dataclasses import dataclass
from typing import Any, Final

# Fields of a request, not of what is in it, that hold token ids or lists of them wherever they can hold many values.
_TOKEN_FIELDS: Final = ("prompt", "tokens", "token_ids", "allowed_token_ids")


@dataclass(slots=True)
class Separators:
    """How many separators a JSON text has, in any of its encodings. Those within strings count too.

    At most two values go with each, and a list or object with each opening one. In plain text and in code there are
    fewer of them than tokens.
    """

    opening: int = 0
    others: int = 0

    @property
    def count(self) -> int:
        return self.opening + self.others

    def add(self, part: bytes) -> None:
        """Takes in the next part of the text."""
        self.opening += part.count(b"[") + part.count(b"{")
        self.others += part.count(b",") + part.count(b":")


def has_more_checks(body: Any, most: int) -> bool:
    """Whether a JSON value has more than `most` values that the engine may have to complain of one by one.

    These are lists and objects, itself included, items of lists, and values of an object's fields that are no strings:
    many texts in many small objects are what a conversation consists of. An object of more than `most` fields is one
    too many whatever they hold. Token ids are no such values: those in `_TOKEN_FIELDS` of the body, where all of a
    list are integers of 32 bits from 0 on, for one other item makes the engine try the whole list as something else.

    A body of n separators has at most n + 1 of them.
    """
    token_lists = _token_lists(body, most)
    pending = [body] if isinstance(body, dict | list) else []
    seen = len(pending)
    while pending:
        container = pending.pop()
        if isinstance(container, dict):
            if len(container) > most:
                return True
            counted = [value for value in container.values() if type(value) is not str]
        elif id(container) in token_lists and _is_token_ids(container):
            continue
        else:
            counted = container
        seen += len(counted)
        if seen > most:
            return True
        pending.extend(value for value in counted if isinstance(value, dict | list))
    return False


def _token_lists(body: Any, most: int) -> set[int]:
    """The `id` of every list where token ids are expected. Of more than `most` lists in one, none is."""
    if not isinstance(body, dict):
        return set()
    lists = [value for name in _TOKEN_FIELDS if isinstance(value := body.get(name), list)]
    nested = [item for items in lists if len(items) <= most for item in items if isinstance(item, list)]
    return {id(items) for items in (*lists, *nested)}


def _is_token_ids(items: list[Any]) -> bool:
    """Whether all are integers of 32 bits, in a tenth of the time that it takes to read them.

    True and false may be among them: the engine takes these for integers, without complaint.
    """
    try:
        array("I", items)
    except (TypeError, OverflowError):
        return False
    return True
