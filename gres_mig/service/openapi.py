"""The API as an OpenAPI document, made from the endpoints and their models; `python -m` prints it."""

from __future__ import annotations

import json
from typing import Any

from pydantic.json_schema import models_json_schema

from gres_mig.service import wire
from gres_mig.service.endpoints import ENDPOINTS, Endpoint

_REFS = "#/components/schemas/{model}"
_FAILURES = {
    "400": "the request is at fault",
    "403": "the caller may not do this",
    "404": "no such kernel of the caller's",
    "413": "the body is too large",
    "500": "the node is at fault",
    "503": "no place now, not within the caller's limits, or no turn in time",
}


def document() -> dict[str, Any]:
    """The whole of it."""
    models = dict.fromkeys([e.answer for e in ENDPOINTS] + [e.body for e in ENDPOINTS if e.body] + [wire.Error])
    asked = {wire.Ask, wire.Report}
    _, schemas = models_json_schema(
        [(model, "validation" if model in asked else "serialization") for model in models], ref_template=_REFS
    )
    paths: dict[str, Any] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(_path(endpoint), {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "gres-mig node service",
            "version": "1",
            "description": "HTTP at a unix socket, one request a connection. Who calls is who connected.",
        },
        "paths": paths,
        "components": {"schemas": schemas["$defs"]},
    }


def text() -> str:
    """As the file has it."""
    return json.dumps(document(), indent=1, sort_keys=True) + "\n"


def _path(endpoint: Endpoint) -> str:
    return endpoint.path.replace("KERNEL", "{kernel}")


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "query", "required": False, "schema": {"type": "string"}} for name in endpoint.query
    ]
    if "KERNEL" in endpoint.path:
        kernel = {"type": "string", "format": "uuid"}
        parameters.append({"name": "kernel", "in": "path", "required": True, "schema": kernel})
    described: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": endpoint.does.__name__,
        "responses": {
            "200": {"description": "done", "content": _content(endpoint.answer)},
            **(
                {"201": {"description": "made", "content": _content(endpoint.answer)}}
                if endpoint.method == "PUT"
                else {}
            ),
            **{code: {"description": why, "content": _content(wire.Error)} for code, why in _FAILURES.items()},
        },
    }
    if parameters:
        described["parameters"] = parameters
    if endpoint.body:
        described["requestBody"] = {"required": True, "content": _content(endpoint.body)}
    return described


def _content(model: type[Any]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REFS.format(model=model.__name__)}}}


if __name__ == "__main__":
    print(text(), end="")
