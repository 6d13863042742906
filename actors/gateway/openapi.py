"""The OpenAPI description of the REST interface, made from the table of its operations."""

import re
from typing import Any

from .rest import OPERATIONS, Operation

_TYPED = re.compile(r"\{(\w+)(?::(\w+))?\}")
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message", "hint"],
            "properties": {
                "code": {"type": "string", "description": "stable and machine-readable"},
                "message": {"type": "string", "description": "what happened, with which value"},
                "hint": {"type": "string", "description": "what to do next"},
            },
        }
    },
}


def description(version: str) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {"Error": _ERROR}
    for one in OPERATIONS:
        path = _TYPED.sub(r"{\1}", one.path)
        paths.setdefault(path, {})[one.method.lower()] = _operation(one, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tinkermq",
            "version": version,
            "description": "Jobs, their curves, rollouts and logs. Send your key as "
            "`Authorization: Bearer <key>`; a pool without keys asks for none.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _operation(one: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    parameters = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "integer" if kind == "int" else "string"},
        }
        for name, kind in _TYPED.findall(one.path)
    ]
    parameters += [
        {"name": name, "in": "query", "description": about, "schema": {"type": kind}}
        for name, kind, about in one.query
    ]
    told: dict[str, Any] = {
        "summary": one.summary,
        "operationId": f"{one.method.lower()}{re.sub(r'[^a-z]+', '_', one.path[7:])}".rstrip("_"),
        "parameters": parameters,
        "responses": {
            "201" if one.path.endswith("/jobs") and one.method == "POST" else "200": {
                "description": one.summary,
                "content": {one.reply: {}},
            },
            "default": {
                "description": "an error",
                "content": {"application/json": {"schema": _ref("Error")}},
            },
        },
    }
    if one.body is not None:
        schema = one.body.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[one.body.__name__] = schema
        told["requestBody"] = {"content": {"application/json": {"schema": _ref(one.body.__name__)}}}
    return told


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
