"""What a node asks for each process of a job that it starts: a key for that process alone."""

from ...broker.client.keys import JobIdentity, episode_secret, job_key
from ...broker.client.rpc import RequestContext, Service
from ...broker.jobs import JobStore, is_final
from ...schemas.agent import EpisodeSecret
from ...schemas.user import JobKeyRequest, NewKey
from ...schemas.wire.errors import AuthError
from ...schemas.wire.message import Empty
from ...schemas.wire.subjects import JobScope, rpc


class JobKeys:
    """Signs keys for actors that a live job has."""

    def __init__(self, jobs: JobStore, secret: bytes) -> None:
        """Sign with `secret`."""
        self._jobs = jobs
        self._secret = secret

    async def open(self, service: Service) -> None:
        """Answer nodes; nobody else may publish there."""
        await service.endpoint("job-key", rpc("node", "keys", "job"), JobKeyRequest, self._sign)

    async def _sign(self, request: JobKeyRequest) -> NewKey:
        record = await self._jobs.find_by_id(request.user, request.job)
        actors = record.actors if record is not None else []
        actor = next((one for one in actors if one.name == request.actor), None)
        if record is None or is_final(record) or record.attempt != request.attempt or not actor:
            raise AuthError(
                f"job {request.job} does not run {request.actor} in attempt {request.attempt}",
                hint="the job has ended or was resumed meanwhile",
            )
        identity = JobIdentity(
            request.user, request.job, actor.role, request.actor, request.attempt
        )
        return NewKey(secret=job_key(identity, self._secret))


# What hosts of episodes ask for, so that programs elsewhere have keys: a secret of the job.


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
