"""Whether the service lives, is ready, what it is, and which keys it signs with."""

from base64 import b64encode
from http import HTTPStatus
from importlib.metadata import version

from fastapi import APIRouter, Response

from gemm_tuner.domain.artifact import ABI_VERSION
from gemm_tuner.sandbox.confine import look_at_sandbox
from gemm_tuner.trust.succession import unrevoked
from gemm_tuner_service.dependencies import Service
from gemm_tuner_service.problems import RESPONSES
from gemm_tuner_service.schemas import Health, PublicKeys, PublicKeyView, Version

router = APIRouter(tags=["service"], responses=RESPONSES)


@router.get("/healthz")
async def read_health() -> Health:
    """Say that the process answers."""
    return Health(status="ok")


@router.get("/readyz", responses={503: {"model": Health, "description": "Not ready"}})
def read_readiness(service: Service, response: Response) -> Health:
    """Say whether the database answers, has the newest schema, and an artifact of it is whole.

    It looks at most every 5 s, and at another artifact each time.
    """
    fault = service.readiness.fault()
    if fault is None:
        return Health(status="ok")
    response.status_code = HTTPStatus.SERVICE_UNAVAILABLE
    return Health(status=fault)


@router.get("/version")
def read_version() -> Version:
    """Return the versions of the package, of this interface and of the kernel ABI.

    `sandbox` is how far workers beside this service shut off what they compile and try.
    """
    return Version(
        gemm_tuner=version("gemm-tuner"),
        api="v1",
        abi_version=ABI_VERSION,
        sandbox=look_at_sandbox().level,
    )


@router.get("/v1/keys")
def list_keys(service: Service) -> PublicKeys:
    """Return the public keys that clients can pin."""
    key_pair = service.key_pair
    view = PublicKeyView(key_id=key_pair.key_id, public_key=b64encode(key_pair.public_key).decode())
    revoked = service.repository.revocations().key_ids
    return PublicKeys(keys=[view], successions=list(unrevoked(service.successions, revoked)))
