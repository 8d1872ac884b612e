"""Plan files: JSON to read and to edit, a binary image to keep. Loading runs no code and believes nothing."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from hyper_mpmd.errors import HyperMpmdError, PlanFormatError
from hyper_mpmd.scheduler.descriptor import describe
from hyper_mpmd.scheduler.loads import check_loads
from hyper_mpmd.scheduler.plan import Plan, PlanHeader
from hyper_mpmd.scheduler.records import CORE_KINDS, PLAN_VERSION, SECTIONS, Records
from hyper_mpmd.scheduler.twin.layout import Layout, Tables
from hyper_mpmd.tasks.graph import TaskGraph

MAGIC = b"hypermpmd.plan\r\n"
_FIXED = struct.Struct("<16sII")  # magic, version, bytes of the header
_COUNT = struct.Struct("<Q")
FORMAT = "hyper_mpmd.plan"


def save(plan: Plan, path: Path) -> None:
    """Write the plan, as JSON where the name ends in .json, else as a binary image."""
    path.write_bytes(to_json(plan).encode() if path.suffix == ".json" else to_bytes(plan))


def load(path: Path) -> Plan:
    """Read either form, told apart by their first bytes."""
    data = path.read_bytes()
    return from_bytes(data) if data.startswith(MAGIC) else from_json(data)


def to_json(plan: Plan) -> str:
    """Header, then each section as its field names and one row a record; a wait or a signal can be edited by hand."""
    parts = [f'"format":"{FORMAT}"', f'"version":{PLAN_VERSION}', f'"header":{plan.header.model_dump_json()}']
    for name, records in plan.sections.items():
        fields = list(records.dtype.names or [])
        rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in records.tolist())
        parts.append(f'"{name}":{{"fields":{json.dumps(fields)},"records":[\n{rows}]}}')
    return "{" + ",\n".join(parts) + "}\n"


def from_json(data: str | bytes) -> Plan:
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise PlanFormatError(f"not a plan file: {error}") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise PlanFormatError(f"not a plan file: it does not say format {FORMAT!r}")
    _check_version(record.get("version"))
    sections = {name: _section(name, dtype, record.get(name)) for name, dtype in SECTIONS.items()}
    return _plan(json.dumps(record.get("header")), sections)


def to_bytes(plan: Plan) -> bytes:
    """The binary image: magic, version, the header's JSON, then each section as a count and its records."""
    header = plan.header.model_dump_json().encode()
    parts = [_FIXED.pack(MAGIC, PLAN_VERSION, len(header)), header]
    for records in plan.sections.values():
        parts.extend((_COUNT.pack(len(records)), records.tobytes()))
    return b"".join(parts)


def from_bytes(data: bytes) -> Plan:
    try:
        magic, version, header_bytes = _FIXED.unpack_from(data)
    except struct.error:
        raise PlanFormatError(f"not a plan file: {len(data)} bytes are too few") from None
    if magic != MAGIC:
        raise PlanFormatError("not a plan file: it starts differently")
    _check_version(version)
    position = _FIXED.size + header_bytes
    header = data[_FIXED.size : position]
    sections = {}
    for name, dtype in SECTIONS.items():
        if len(data) - position < _COUNT.size:
            raise PlanFormatError(f"plan file ends at byte {len(data)}, before section {name!r}")
        (count,) = _COUNT.unpack_from(data, position)
        position += _COUNT.size
        if count * dtype.itemsize > len(data) - position:
            raise PlanFormatError(f"section {name!r}: {count} records do not fit in the rest of the file")
        sections[name] = np.frombuffer(data, dtype, count, position)
        position += count * dtype.itemsize
    if position != len(data):
        raise PlanFormatError(f"{len(data) - position} bytes follow the last section")
    return _plan(header, sections)


def _check_version(version: Any) -> None:
    if version != PLAN_VERSION:
        raise PlanFormatError(f"plan version is {version!r}; this library reads version {PLAN_VERSION}")


def _section(name: str, dtype: np.dtype[Any], given: Any) -> Records:
    if not isinstance(given, dict) or not isinstance(given.get("records"), list):
        raise PlanFormatError(f"section {name!r} is missing or is not fields and records")
    fields = list(dtype.names or [])
    if given.get("fields") != fields:
        raise PlanFormatError(f"section {name!r} has fields {given.get('fields')!r}; they must be {fields}")
    rows = given["records"]
    records = np.zeros(len(rows), dtype)
    for number, row in enumerate(rows):
        cells = row if fields else [row]
        if not isinstance(cells, list) or len(cells) != max(1, len(fields)):
            raise PlanFormatError(f"section {name!r}, record {number}: {row!r} is not {len(fields)} numbers")
        for cell in cells:
            if isinstance(cell, bool) or not isinstance(cell, int):
                raise PlanFormatError(f"section {name!r}, record {number}: {cell!r} is not a whole number")
        try:
            records[number] = tuple(cells) if fields else cells[0]
        except OverflowError:
            raise PlanFormatError(f"section {name!r}, record {number}: {row!r} does not fit its fields") from None
    return records


def _plan(header: str | bytes, sections: dict[str, Records]) -> Plan:
    try:
        parsed = PlanHeader.model_validate_json(header)
    except ValidationError as error:
        first = error.errors()[0]
        raise PlanFormatError(f"plan header: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    plan = Plan(parsed, sections)
    try:
        graph = plan.graph
    except HyperMpmdError as error:
        raise PlanFormatError(f"the plan's graph: {error}") from error
    if not 0 <= parsed.rank < parsed.ranks or parsed.ranks != graph.ranks:
        raise PlanFormatError(f"rank {parsed.rank} of {parsed.ranks}, but the graph is for {graph.ranks} ranks")
    _check_tables(plan, graph)
    _check_references(plan)
    return plan


def _check_tables(plan: Plan, graph: TaskGraph) -> None:
    """Ops and tensors must be those of the graph under the loads: the engine takes shapes and kernels from them."""
    try:
        counts = check_loads(graph, plan.header.loads)
        descriptor = describe(graph)
        tables = Tables.of(descriptor)
        layout = Layout(tables, {descriptor.space_names.index(name): n for name, n in counts.items()})
        wanted = {"ops": tables.op_records(), "tensors": layout.tensor_records(plan.rank)}
    except HyperMpmdError as error:
        raise PlanFormatError(f"the plan's graph and loads: {error}") from error
    for name, records in wanted.items():
        found = plan.sections[name]
        if len(found) != len(records):
            raise PlanFormatError(f"section {name!r} has {len(found)} records; the plan's graph has {len(records)}")
        for number in np.flatnonzero(found != records)[:1]:
            raise PlanFormatError(
                f"section {name!r}, record {number}: {found[number]} should be {records[number]} (fields "
                f"{', '.join(found.dtype.names or ())}), by the plan's graph and loads"
            )


# (section, a field that numbers one record of another section, that section)
_POINTERS: tuple[tuple[str, str, str], ...] = (
    ("tasks", "op", "ops"),
    ("tasks", "launch", "launches"),
    ("tasks", "peer", "peers"),
    ("accesses", "tensor", "tensors"),
    ("accesses", "rank", "peers"),
    ("waits", "event", "events"),
    ("signals", "rank", "peers"),
    ("events", "signaller", "peers"),
)
# (section, first and number of the records of another section that belong to each of its own, that section)
_SHARES: tuple[tuple[str, str, str, str], ...] = (
    ("tasks", "access_begin", "access_count", "accesses"),
    ("tasks", "wait_begin", "wait_count", "waits"),
    ("tasks", "signal_begin", "signal_count", "signals"),
    ("queues", "begin", "count", "tasks"),
    ("launches", "dependency_begin", "dependency_count", "dependencies"),
)


def _check_references(plan: Plan) -> None:
    """What reads a plan follows these numbers: none may lead astray. Whether the plan can run, the engine checks."""
    sections = plan.sections
    for name, field, into in _POINTERS:
        _check_below(f"section {name!r}", field, sections[name][field], len(sections[into]), into)
    _check_below("section 'queues'", "kind", sections["queues"]["kind"], len(CORE_KINDS), "core kinds")
    _check_below("section 'dependencies'", "launch", sections["dependencies"], len(sections["launches"]), "launches")
    local = sections["signals"]["event"][sections["signals"]["rank"] == plan.rank]
    _check_below("signals of this rank", "event", local, len(sections["events"]), "events")
    for name, begin, count, into in _SHARES:
        counts = sections[name][count].astype(np.int64)
        begins = np.cumsum(counts) - counts
        for number in np.flatnonzero(sections[name][begin] != begins)[:1]:
            raise PlanFormatError(
                f"section {name!r}, record {number}: {begin} is {sections[name][begin][number]}; those of the records "
                f"before end at {begins[number]}"
            )
        if counts.sum() != len(sections[into]):
            raise PlanFormatError(
                f"the {count} of section {name!r} add up to {counts.sum()}; section {into!r} has {len(sections[into])}"
            )


def _check_below(where: str, field: str, values: NDArray[Any], limit: int, what: str) -> None:
    for number in np.flatnonzero(values >= limit)[:1]:
        raise PlanFormatError(f"{where}, record {number}: {field} is {values[number]}; there are {limit} {what}")
