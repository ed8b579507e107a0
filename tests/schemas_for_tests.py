"""docs/schemas/, by which tests hold the JSON documents of commands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from jsonschema import Draft202012Validator

from tests.planted.records import ROOT

SCHEMAS = {
    file.stem: json.loads(file.read_text())
    for file in sorted((ROOT / "docs" / "schemas").glob("*.json"))
}


def tighten(schema: Any) -> Any:
    """A schema that allows no key which it does not describe."""
    if isinstance(schema, list):
        return [*map(tighten, schema)]
    if not isinstance(schema, dict):
        return schema
    closed = {} if "properties" not in schema else {"additionalProperties": False}
    return closed | {name: tighten(part) for name, part in schema.items()}


def find_faults(document: Any) -> list[str]:
    """What the schema of a document does not allow, and what it does not describe."""
    schema = tighten(SCHEMAS[document["format"].removeprefix("precision-bench ")])
    errors = Draft202012Validator(schema).iter_errors(document)
    return [f"{error.json_path}: {error.message[:200]}" for error in errors]


def read_document(text: str) -> Any:
    """A document that a command printed, which has to be as its schema says."""
    document = json.loads(text)
    assert not (faults := find_faults(document)), faults[:5]
    return document


def list_described(schema: Any, value: Any, root: Any) -> Iterator[tuple[dict, dict[str, Any]]]:
    """Each object of a document whose keys a schema describes, with that schema."""
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
    for part in schema.get("anyOf", ()):
        yield from list_described(part, value, root)
    if isinstance(value, list) and "items" in schema:
        for one in value[:1]:
            yield from list_described(schema["items"], one, root)
    if isinstance(value, dict):
        parts = schema.get("properties", {})
        if parts:
            yield schema, value
        for name, one in value.items():
            part = parts.get(name, schema.get("additionalProperties"))
            yield from list_described(part if isinstance(part, dict) else {}, one, root)
