"""What hosts of episodes ask for, so that programs elsewhere have keys: a secret of the job."""

from ...broker.client.keys import episode_secret
from ...broker.client.rpc import RequestContext, Service
from ...broker.jobs import JobStore, is_final
from ...schemas.agent import EpisodeSecret
from ...schemas.wire.errors import AuthError
from ...schemas.wire.message import Empty
from ...schemas.wire.subjects import JobScope


class EpisodeSecrets:
    """Tells the hosts of a live job what they sign the keys of its episodes with.

    Who may ask may do what these keys are good for anyway: he is the job's user, or one of its
    environment hosts. They ask once, so that episodes begin while no auth service is there, too.
    """

    def __init__(self, jobs: JobStore, pool_secret: bytes) -> None:
        """Derive what is told from `pool_secret`."""
        self._jobs = jobs
        self._pool_secret = pool_secret

    async def open(self, service: Service) -> None:
        """Answer hosts; the broker sees to it that they name their own job."""
        subject = JobScope.all_episode_keys()
        await service.endpoint("episode-keys", subject, Empty, self._tell, fair=True)

    async def _tell(self, request: Empty, context: RequestContext) -> EpisodeSecret:
        del request
        user, job = context.subject.split(".")[3:5]
        record = await self._jobs.find_by_id(user, job)
        if record is None or is_final(record):
            raise AuthError(
                f"user {user} runs no job {job}", hint="keys of episodes are for jobs that run"
            )
        return EpisodeSecret(secret=episode_secret(user, job, self._pool_secret))
