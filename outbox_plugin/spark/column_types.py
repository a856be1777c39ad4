"""The Spark types that columns of events and of business rows may have. No I/O."""

from __future__ import annotations

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    FractionalType,
    IntegralType,
    MapType,
    NullType,
    NumericType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

TEXTS = (StringType, BinaryType, NullType)
PLAIN = (*TEXTS, BooleanType, NumericType, DateType, TimestampType, TimestampNTZType)
KEYS = (*TEXTS, NumericType, DateType, BooleanType)
DECIMAL_ORDER = "0::numeric"
_ORDERED: tuple[tuple[type[DataType], str], ...] = (
    (StringType, "''::text COLLATE \"C\""),  # This collation compares byte by byte, as Spark does.
    (DecimalType, DECIMAL_ORDER),
    (IntegralType, "0::bigint"),
    (FractionalType, "0::float8"),
    (BooleanType, "true"),
    (DateType, "now()::date"),
    (TimestampType, "now()"),
    (TimestampNTZType, "now()::timestamp"),
)


def is_document(kind: DataType) -> bool:
    """Whether a value of the type becomes JSON."""
    return isinstance(kind, StructType | MapType | ArrayType) and _has_json(kind)


def are_headers(kind: DataType) -> bool:
    """Whether a value of the type is an event's headers."""
    if isinstance(kind, MapType):
        return isinstance(kind.keyType, StringType) and isinstance(kind.valueType, TEXTS)
    pair = kind.elementType if isinstance(kind, ArrayType) else None
    return isinstance(pair, StructType) and pair.names == ["key", "value"] and isinstance(pair["value"].dataType, TEXTS)


def are_bytes(kind: DataType) -> bool:
    """Whether values of the type are bytes, or headers whose values are."""
    if isinstance(kind, MapType):
        return isinstance(kind.valueType, BinaryType)
    pair = kind.elementType if isinstance(kind, ArrayType) else None
    return isinstance(kind, BinaryType) or (
        isinstance(pair, StructType) and isinstance(pair["value"].dataType, BinaryType)
    )


def ordered_as(kind: DataType) -> str | None:
    """An SQL value whose Postgres type sorts as Spark sorts `kind`; None if Postgres has no such type."""
    if isinstance(kind, StringType) and not kind.isUTF8BinaryCollation():  # Postgres may lack the collation.
        return None
    return next((example for known, example in _ORDERED if isinstance(kind, known)), None)


def _has_json(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return all(_has_json(field.dataType) for field in kind.fields)
    if isinstance(kind, MapType):
        return isinstance(kind.keyType, PLAIN) and _has_json(kind.valueType)
    return _has_json(kind.elementType) if isinstance(kind, ArrayType) else isinstance(kind, PLAIN)
