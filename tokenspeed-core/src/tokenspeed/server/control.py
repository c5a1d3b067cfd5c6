"""Routes that change the server's state or look inside it, with vLLM's names.

They need the control key, or, without one, a server that only this machine can reach and a caller that is no web page
of another site.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Query, Request, Response

from tokenspeed import __version__
from tokenspeed.server.errors import ApiError, JsonResponse
from tokenspeed.server.middleware import matches_key
from tokenspeed.server.openai import AbortRequests, PauseMode
from tokenspeed.server.routes import ServiceDep, router
from tokenspeed.server.service import Service

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1", "[::1]"})


async def guard(request: Request, service: ServiceDep) -> None:
    """Raises ApiError 401 or 403 unless the caller may control the server."""
    options = service.options
    if options.control_key is not None:
        if not matches_key(request.headers, (options.control_key,)):
            challenge = {"www-authenticate": "Bearer"}
            raise ApiError(401, "control routes need `Authorization: Bearer CONTROL_KEY`", headers=challenge)
        return
    if not options.is_loopback:
        message = "control routes are closed: start the server with --control-key, or bind it to 127.0.0.1"
        raise ApiError(403, message, reason="control_closed")
    # A page of another site can make a browser send requests here; it cannot hide where it comes from.
    origin = request.headers.get("origin")
    if request.url.hostname not in LOOPBACK_NAMES or (origin and origin.partition("://")[2] != request.url.netloc):
        raise ApiError(403, "control routes accept no requests from web pages of other sites", reason="control_closed")


routes = router(tags=["control"], dependencies=[Depends(guard)])
about = router(tags=["server"])


@routes.post("/abort_requests")
@routes.post("/inference/v1/abort_requests", include_in_schema=False)
async def abort_requests(service: ServiceDep, body: AbortRequests | None = None) -> Response:
    """End requests by id; all of them when the list is empty. What they have generated is still returned."""
    aborted = service.abort((body.request_ids if body else None) or None)
    return JsonResponse({"status": "aborted", "aborted": aborted})


@routes.post("/reset_prefix_cache")
async def reset_prefix_cache(service: ServiceDep) -> Response:
    """Forget cached prefixes; pages that running requests hold stay with them."""
    return JsonResponse({"success": bool(await service.client.call("reset_prefix_cache"))})


@routes.post("/pause")
async def pause(
    service: ServiceDep, mode: Annotated[PauseMode, Query()] = "abort", clear_cache: Annotated[bool, Query()] = True
) -> Response:
    """Stop the engine: end running requests (`abort`), let them finish (`wait`) or freeze them (`keep`).

    In the first two modes new requests get 503 until `/resume`; in the last they wait. `wait` ends early, and says so
    with the status `resumed`, when `/resume` comes first.
    """
    await service.pause(mode, keep_accepting=mode == "keep")
    if clear_cache and mode != "keep":
        await service.client.call("reset_prefix_cache")
    return JsonResponse({"status": "paused" if service.is_paused else "resumed"})


@routes.post("/resume")
async def resume(service: ServiceDep) -> Response:
    """Go on after `/pause`."""
    await service.resume()
    return JsonResponse({"status": "resumed"})


@routes.get("/is_paused")
async def is_paused(service: ServiceDep) -> Response:
    """Whether `/pause` is in force."""
    return JsonResponse({"is_paused": service.is_paused})


@about.get("/get_world_size")
async def get_world_size(include_dp: Annotated[bool, Query()] = True) -> Response:
    """Number of processes that hold the model."""
    del include_dp  # there is one data-parallel rank
    return JsonResponse({"world_size": 1})


@about.get("/server_info")
@about.get("/get_server_info", include_in_schema=False)
async def server_info(service: ServiceDep) -> Response:
    """Options, sizes and state: SGLang's flat keys, and vLLM's `vllm_config` beside them."""
    stats = await service.stats()
    return JsonResponse({**_flat(service), "vllm_config": _nested(service), "internal_states": [stats]})


def _flat(service: Service) -> dict[str, Any]:
    info = service.info
    return {
        **(service.options.public or {}),
        "version": __version__,
        "model_path": info.model_path,
        "served_model_name": service.model_name,
        "dtype": info.dtype,
        "tp_size": 1,
        "dp_size": 1,
        "pp_size": 1,
        "ep_size": 1,
        "num_gpus": 1,
        "disaggregation_mode": "null",
        "encoder_only": False,
        "enable_memory_saver": False,
        "enable_return_routed_experts": False,
        "max_model_len": service.limits.max_model_len,
        "max_num_seqs": info.max_num_seqs,
        "kv_tokens": info.kv_tokens,
        "weight_version": info.weight_version,
        "system_fingerprint": info.fingerprint,
    }


def _nested(service: Service) -> dict[str, Any]:
    info = service.info
    return {
        "model_config": {
            "model": info.model_path,
            "dtype": info.dtype,
            "max_model_len": service.limits.max_model_len,
            "logprobs_mode": f"{info.logprobs_mode}_logprobs",
            "max_logprobs": service.limits.engine.max_logprobs,
        },
        "scheduler_config": {"max_num_seqs": info.max_num_seqs},
        "parallel_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1},
        "weight_transfer_config": None,
    }
