"""Routes that exchange the weights of a running server, in the shapes that trainers send.

The new weights lie in a folder that the engine's machine can read. They are checked before anything is exchanged: a
request that fails leaves the old ones serving. Requests in flight are ended or go on with the new weights, as asked;
nothing that the old weights computed is read again.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from fastapi import Depends, Response
from pydantic import Field

from tokenspeed.errors import RequestError
from tokenspeed.server.control import guard
from tokenspeed.server.errors import ApiError, JsonResponse
from tokenspeed.server.fields import StrictModel
from tokenspeed.server.routes import ServiceDep, router

WeightVersion = Annotated[str, Field(min_length=1, max_length=256)]
"""A name for a set of weights; every reply carries it."""

routes = router(tags=["weights"], dependencies=[Depends(guard)])


class UpdateWeightsFromDisk(StrictModel):
    """`POST /update_weights_from_disk`. The prefix cache is always flushed: it belongs to the old weights."""

    ignored: ClassVar = frozenset(
        {"flush_cache", "is_async", "keep_pause", "recapture_cuda_graph", "token_step", "torch_empty_cache"}
    )
    unsupported: ClassVar = {"manifest": ()}

    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: WeightVersion | None = None


class UpdateWeights(StrictModel):
    """`POST /update_weights`, as prime-rl sends it. vLLM's `update_info` asks for a transfer that is not supported."""

    weight_dir: str | None = None
    update_info: Any = None
    weight_version: WeightVersion | None = None


class UpdateWeightVersion(StrictModel):
    """`POST /update_weight_version`."""

    new_version: WeightVersion
    abort_all_requests: bool = False


@routes.post("/update_weights_from_disk")
async def update_weights_from_disk(body: UpdateWeightsFromDisk, service: ServiceDep) -> Response:
    """Serve the weights of the folder `model_path` from now on; 400, and nothing has changed, when they do not fit."""
    if body.load_format not in (None, "auto", "safetensors"):
        raise ApiError(400, f"load_format {body.load_format!r} is not one of auto, safetensors", param="load_format")
    flying = service.client.in_flight
    try:
        info = await service.change_weights(
            "update_weights", folder=body.model_path, weight_version=body.weight_version, abort=body.abort_all_requests
        )
    except RequestError as error:
        return JsonResponse({"success": False, "message": str(error), "num_paused_requests": 0}, status_code=400)
    message = f"Succeeded to update model weights to version {info.weight_version}."
    return JsonResponse(
        {
            "success": True,
            "message": message,
            "num_paused_requests": flying,
            "weight_version": info.weight_version,
            "system_fingerprint": info.fingerprint,
        }
    )


@routes.post("/update_weights")
async def update_weights(body: UpdateWeights, service: ServiceDep) -> Response:
    """Serve the weights of the folder `weight_dir` from now on; requests in flight go on with them."""
    if body.update_info is not None:
        raise ApiError(501, "weights are read from a folder: give `weight_dir`, not `update_info`", param="update_info")
    if body.weight_dir is None:
        raise ApiError(400, "give `weight_dir`, a folder with safetensors", param="weight_dir")
    info = await service.change_weights(
        "update_weights", folder=body.weight_dir, weight_version=body.weight_version, abort=False
    )
    return JsonResponse(
        {
            "status": "ok",
            "message": "Weights updated",
            "weight_version": info.weight_version,
            "system_fingerprint": info.fingerprint,
        }
    )


@routes.post("/update_weight_version")
async def update_weight_version(body: UpdateWeightVersion, service: ServiceDep) -> Response:
    """Stamp replies with another version; the weights stay as they are."""
    info = await service.change_weights(
        "rename_weights", weight_version=body.new_version, abort=body.abort_all_requests
    )
    message = f"Weight version updated to {info.weight_version}"
    return JsonResponse({"success": True, "message": message, "new_version": info.weight_version})
