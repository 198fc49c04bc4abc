"""The unfinished requests of an engine's client, and which of them the core has, under which name.

A request's life here: added -> held, while no process is up or a search is on -> given to the core, under another id
each time, so that late answers to an earlier time fall on the floor -> forgotten when it ends. One thread owns it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Record:
    """An unfinished request."""

    request_id: str
    encoded: bytes | None  # as first submitted, until it is given for the first time
    times_given: int = 0
    core_id: str | None = None  # its id in the core; None: the core does not have it now


class Ledger:
    """Records by the client's id and by the core's."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}
        self._held: dict[str, Record] = {}  # those that the core does not have
        self._by_core_id: dict[str, Record] = {}

    def __len__(self) -> int:
        return len(self._records)

    @property
    def core_has_work(self) -> bool:
        """Whether the core has any of them."""
        return bool(self._by_core_id)

    def add(self, record: Record) -> None:
        self._records[record.request_id] = self._held[record.request_id] = record

    def find(self, request_id: str) -> Record | None:
        return self._records.get(request_id)

    def of_core(self, core_id: str) -> Record | None:
        """Whom an answer is for; None: it was aborted, or the answer is to an earlier time."""
        return self._by_core_id.get(core_id)

    def held(self) -> list[Record]:
        """Those that the core does not have, in the order in which they came."""
        return list(self._held.values())

    def given(self, record: Record, core_id: str) -> None:
        """The core has it now, under this id."""
        record.encoded, record.core_id = None, core_id
        record.times_given += 1
        self._by_core_id[core_id] = record
        del self._held[record.request_id]

    def take_back(self, record: Record) -> None:
        """The core does not have it any more, and it is not over."""
        self._leave_core(record)
        self._held[record.request_id] = record

    def take_back_all(self) -> None:
        """The core is gone. All are held, in the order of arrival again."""
        for record in self._records.values():
            self._leave_core(record)
        self._held = dict(self._records)

    def forget(self, record: Record) -> None:
        """It is over."""
        self._leave_core(record)
        self._records.pop(record.request_id, None)
        self._held.pop(record.request_id, None)

    def clear(self) -> list[str]:
        """Forget all. Returns their ids."""
        ids = list(self._records)
        self.__init__()
        return ids

    def _leave_core(self, record: Record) -> None:
        if record.core_id is not None:
            self._by_core_id.pop(record.core_id, None)
            record.core_id = None
