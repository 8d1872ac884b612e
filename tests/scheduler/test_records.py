"""The numpy dtypes, constants and table columns are those of the C++ headers."""

import numpy as np
from hyper_mpmd._native import planner
from hyper_mpmd._native import records as native

from hyper_mpmd.scheduler import descriptor
from hyper_mpmd.scheduler import records as R


def test_every_field_of_every_record_has_the_offset_and_size_of_the_header():
    layouts, dtypes = native.record_layouts(), R.SECTIONS | {"cores": R.CORE}
    assert set(layouts) == set(dtypes) - {"dependencies"}
    for name, (size, fields) in layouts.items():
        dtype = dtypes[name]
        assert dtype.itemsize == size, name
        assert dtype.fields is not None
        mirrored = [(field, int(dtype.fields[field][1]), dtype.fields[field][0].itemsize) for field in dtype.names]
        assert mirrored == fields, name
    assert R.CORE.itemsize == 64
    assert R.SECTIONS["dependencies"] == np.dtype("<u4")


def test_constants_are_those_of_the_header():
    constants = native.constants()
    assert {name: getattr(R, name) for name in constants} == constants


def test_descriptor_tables_have_the_columns_of_the_native_structs():
    columns = {
        "spaces": descriptor.SPACE_COLUMNS,
        "tensors": descriptor.TENSOR_COLUMNS,
        "ops": descriptor.OP_COLUMNS,
        "operands": descriptor.OPERAND_COLUMNS,
    }
    assert {name: tuple(names.split()) for name, names in planner.table_columns().items()} == columns
