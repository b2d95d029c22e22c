"""`/metrics`, for Prometheus."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from localkv.server.failures import RequestError, unsupported
from localkv.server.front import Front


async def metrics(front: Front, request: Request) -> Response:
    """GET /metrics: what the server does and did, in Prometheus' text format."""
    from localkv.server.metrics import CONTENT_TYPE

    if not front.settings.has_metrics:
        raise unsupported("/metrics", "start the server without --no-metrics")
    if front.metrics is None:
        raise RequestError(503, "the server is starting", headers={"retry-after": "1"})
    started = {"process-start-time-unix": str(front.started)}
    return Response(front.metrics.text(), headers=started, media_type=CONTENT_TYPE)
