"""Ask for everything that the service keeps, with the SDK's own calls; print `all well` at the end.

Runs with any SDK: what an older one does not have is left out.
"""

import io
import json
import sys
import tarfile
import time
import urllib.error
import urllib.request

import tinker
from tinker import types

BASE = sys.argv[1]
NEW = hasattr(tinker.TrainingClient, "save_weights_external")


def made(future):
    """Newer SDKs return a future of a client, older ones the client."""
    return future.result() if hasattr(future, "result") else future


def refused(call, *said):
    told = ""
    try:
        call()
    except (tinker.TinkerError, ValueError) as error:
        told = str(error)
    assert told, f"nothing said {said}"
    assert all(one in told for one in said), told


def fetch(url):
    with urllib.request.urlopen(url) as answer:
        return answer.read()


def shape(config, weights):
    assert json.loads(config)["r"] == 4
    assert json.loads(config)["base_model_name_or_path"] == BASE
    header = json.loads(weights[8 : 8 + int.from_bytes(weights[:8], "little")])
    assert any("lora_A" in name for name in header), list(header)[:3]


service = tinker.ServiceClient(user_metadata={"project": "owls"})
rest = service.create_rest_client()
before = rest.list_training_runs().result().cursor.total_count
trained = made(
    service.create_lora_training_client(
        base_model=BASE, rank=4, seed=3, user_metadata={"renderer_name": "role_colon"}
    )
)
run = trained.get_info().model_id
data = [
    types.Datum(
        model_input=types.ModelInput.from_ints(list(range(20, 39))),
        loss_fn_inputs={"target_tokens": list(range(21, 40)), "weights": [1.0] * 19},
    )
]
trained.forward_backward(data, "cross_entropy").result()
trained.optim_step(types.AdamParams(learning_rate=1e-2)).result()

first = trained.save_state("first").result().path
second = trained.save_state("second", ttl_seconds=7200).result().path
sampled = trained.save_weights_for_sampler("sampled").result().path
refused(trained.save_state("first").result, "first", "already", "overwrite")
assert trained.save_state("first", overwrite=True).result().path == first

found = rest.list_checkpoints(run).result().checkpoints
assert {one.tinker_path for one in found} == {first, second, sampled}, found
by_path = {one.tinker_path: one for one in found}
assert by_path[first].checkpoint_id == "weights/first"
assert by_path[first].checkpoint_type == "training"
assert by_path[sampled].checkpoint_type == "sampler"
assert by_path[first].size_bytes > by_path[sampled].size_bytes > 1000
assert by_path[first].expires_at is None
assert (by_path[second].expires_at - by_path[second].time).total_seconds() == 7200
assert not by_path[first].public

one = rest.get_training_run(run).result()
assert (one.training_run_id, one.base_model, one.lora_rank) == (run, BASE, 4)
assert one.user_metadata == {"renderer_name": "role_colon"}
assert one.last_checkpoint.tinker_path == first
assert one.last_sampler_checkpoint.tinker_path == sampled
assert rest.get_training_run_by_tinker_path(second).result() == one
listed = rest.list_training_runs(limit=1).result()
assert listed.training_runs[0].training_run_id == run
assert listed.cursor.total_count == before + 1
everything = rest.list_user_checkpoints(limit=2).result()
assert len(everything.checkpoints) == 2
assert everything.cursor.total_count >= 3
following = rest.list_user_checkpoints(limit=2, offset=2).result().checkpoints
assert not {one.tinker_path for one in following} & {
    one.tinker_path for one in everything.checkpoints
}
info = rest.get_weights_info_by_tinker_path(first).result()
assert (info.base_model, info.lora_rank) == (BASE, 4)

session = run.split(":")[0]
assert session in rest.list_sessions().result().sessions
sampler = made(service.create_sampling_client(model_path=sampled))
seen = rest.get_session(session).result()
assert seen.training_run_ids == [run]
assert not NEW or seen.user_metadata == {"project": "owls"}
assert len(seen.sampler_ids) == 1
about = rest.get_sampler(seen.sampler_ids[0]).result()
assert (about.base_model, about.model_path) == (BASE, sampled)
assert sampler.get_base_model() == BASE

rest.set_checkpoint_ttl_from_tinker_path(first, 3600).result()
rest.set_checkpoint_ttl_from_tinker_path(second, None).result()
rest.publish_checkpoint_from_tinker_path(first).result()
by_path = {one.tinker_path: one for one in rest.list_checkpoints(run).result().checkpoints}
assert by_path[first].public
assert by_path[first].expires_at is not None
assert by_path[second].expires_at is None
rest.unpublish_checkpoint_from_tinker_path(first).result()
assert not any(one.public for one in rest.list_checkpoints(run).result().checkpoints)

if NEW:
    saved = trained.save_weights_external("out", ttl_seconds=3600).result()
    assert saved.path.endswith("/external_weights/out")
    urls = rest.get_external_weights_urls(saved.path).result()
    files = {name: fetch(url) for name, url in urls.urls.items()}
    assert set(files) == {"adapter_config.json", "adapter_model.safetensors"}
    (exported,) = (
        one
        for one in rest.list_checkpoints(run).result().checkpoints
        if one.checkpoint_type == "external"
    )
    assert sum(map(len, files.values())) == exported.size_bytes
    shape(files["adapter_config.json"], files["adapter_model.safetensors"])
    try:
        fetch(urls.urls["adapter_config.json"].replace("/files/", "/files/x"))
        refused_with = 0
    except urllib.error.HTTPError as error:
        refused_with = error.code
    assert refused_with in (404, 503)
    rest.delete_checkpoint_from_tinker_path(saved.path).result()
    refused(rest.get_external_weights_urls(saved.path).result, "was deleted")
else:
    for path in (first, sampled):
        url = rest.get_checkpoint_archive_url_from_tinker_path(path).result().url
        with tarfile.open(fileobj=io.BytesIO(fetch(url))) as archive:
            files = {one.name: archive.extractfile(one).read() for one in archive.getmembers()}
        assert "checkpoint_complete" in files
        shape(files["adapter_config.json"], files["adapter_model.safetensors"])

rest.delete_checkpoint_from_tinker_path(second).result()
refused(rest.delete_checkpoint_from_tinker_path(second).result, "was deleted")
refused(lambda: made(service.create_training_client_from_state(second)), "was deleted")
refused(rest.get_training_run("s0:train:0").result, "no training run")
refused(rest.get_session("s0").result, "no session")
refused(rest.list_checkpoints("s0:train:0").result, "no training run")
refused(rest.get_weights_info_by_tinker_path(first.replace("first", "no")).result, "no checkpoint")
rest.delete_checkpoint(run, "weights/first").result()
prompt, few = types.ModelInput.from_ints([20, 21]), types.SamplingParams(max_tokens=2)
assert len(sampler.sample(prompt, 1, few).result().sequences) == 1
assert [one.tinker_path for one in rest.list_checkpoints(run).result().checkpoints] == [sampled]
rest.delete_checkpoint_from_tinker_path(sampled).result()
refused(sampler.sample(prompt, 1, few).result, sampled, "was deleted")
short = trained.save_weights_for_sampler("short", ttl_seconds=1).result().path
time.sleep(1.5)
refused(lambda: made(service.create_sampling_client(model_path=short)), short, "has expired")
assert rest.list_checkpoints(run).result().checkpoints == []
print("all well")
