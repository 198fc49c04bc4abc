"""`build`: from a recipe to an artifact, through the cache, within memory and disk, and good enough or not at all.

The engine is built as an artifact in the cache first; the artifact asked for is linked from there, with its own name,
serving defaults and bounds. So a second build of the same recipe, or of one that differs in those, takes no time.
"""

from __future__ import annotations

import datetime
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from builder import stages
from builder.cache import BuildCache, build_key, place, uses_native
from builder.drafts.build_head import build_head
from builder.embedding_parity import check_embedding_quality, measure_embedding
from builder.estimate import Estimate, ModelSize, estimate, require, require_disk, same_disk
from builder.layer_graph import GRAPH_NAME
from builder.machine_choices import for_this_machine
from builder.model_card import model_card
from builder.model_info import model_info, num_parameters
from builder.parity import check_quality, measure
from builder.process_memory import release_memory
from builder.progress import BuildProgress
from builder.quantization.prepare import PreparedWeights, needs_calibration, needs_preparing, prepare_weights
from builder.recipe import Recipe, recipe_hash, recipe_to_dict
from runtime.artifact import Artifact, check_files, installed_plugins, read_manifest
from runtime.artifact_writer import ArtifactWriter, check_replaceable
from runtime.errors import ArtifactError, BuildError
from runtime.hardware import this_machine
from runtime.manifest import EmbeddingInfo, EmbeddingParity, FileInfo, HardwareInfo, Limits, Manifest, RuntimeDefaults
from runtime.memory import format_size
from runtime.version import __version__

if TYPE_CHECKING:
    from zoo.checkpoint import Checkpoint

CARD_NAME = "README.md"
_SCRATCH = ".scratch"
_CALIBRATION = ".calibration"  # in the build cache: layers' results, for builds that are interrupted


@dataclass(frozen=True, slots=True)
class BuildResult:
    """What a build came to. `cached`: the engine had been built before; `manifest` is the artifact's."""

    path: Path
    manifest: Manifest
    cached: bool


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """What a build would do, for `--dry-run`. `cached` is None where that takes a model that is not pulled yet."""

    recipe: Recipe
    out: Path
    source: str
    pulled: bool
    cached: bool | None
    estimate: Estimate


def build(
    recipe: Recipe,
    out: str | Path | None = None,
    *,
    force: bool = False,
    dry_run: bool = False,
    progress: BuildProgress | None = None,
) -> Path:
    """Build `recipe` into the folder `out` (default: artifacts/NAME) and return that folder.

    Args:
        recipe: what to build, see `load_recipe`.
        out: an artifact there is replaced if it is an earlier build of a recipe of the same name.
        force: build anew whatever the cache holds, and replace an artifact of another recipe.
        dry_run: only check that the build can be made; nothing is written.
        progress: is told where the build is.

    Raises:
        PlancastError: the build cannot be made, or its engine breaks a bound of `recipe.quality`. Nothing is left
            behind, whatever ends the build.
    """
    if dry_run:
        return plan_build(recipe, out).out
    return run_build(recipe, out, force=force, progress=progress).path


def default_out(recipe: Recipe) -> Path:
    """Where the artifact of `recipe` goes unless told otherwise."""
    return Path("artifacts") / recipe.name


def plan_build(recipe: Recipe, out: str | Path | None = None, *, force: bool = False) -> BuildPlan:
    """Check that `recipe` can be built into `out`, and say what it would take. Writes and pulls nothing.

    Raises:
        PlancastError: what stands in the way.
    """
    from zoo.models import parse_model, recorded

    recipe = for_this_machine(recipe)
    target = Path(out) if out is not None else default_out(recipe)
    _check_target(target, recipe, force=force)
    wanted = parse_model(recipe.model)
    cache, quiet = _cache(), BuildProgress()
    cached = None
    if wanted.folder is not None or recorded(wanted, recipe.trust_remote_code) is not None:
        checkpoint = stages.pull(recipe, quiet)
        pulled, source, size = True, checkpoint.source, _model_size(checkpoint)
        cached = not force and cache.find(build_key(recipe, checkpoint.file_hashes(quiet)), quiet) is not None
    elif wanted.gguf is not None:  # making a checkpoint of it would write
        pulled, source, size = True, f"gguf:{wanted.gguf}", _gguf_size(wanted.gguf, recipe)
    elif wanted.card is not None:
        shape = wanted.card.shape
        pulled, source = False, " or ".join(source.label for source in wanted.sources)
        size = ModelSize(wanted.card.parameters, shape.layers, shape.vocab_size, shape.hidden_size)
    else:
        raise BuildError(f"{recipe.model} is not pulled, so its size is unknown; plancast zoo pull {recipe.model}")
    cost = estimate(recipe, size)
    if not cached:
        require(cost, cache=cache.root)
    return BuildPlan(recipe, target, source, pulled, cached, cost)


def run_build(
    recipe: Recipe, out: str | Path | None = None, *, force: bool = False, progress: BuildProgress | None = None
) -> BuildResult:
    """As `build`; returns what came of it."""
    recipe = for_this_machine(recipe)
    target = Path(out) if out is not None else default_out(recipe)
    progress = progress or BuildProgress()
    cache = _cache()
    with progress:
        _check_target(target, recipe, force=force)
        with progress.stage("pull") as stage:
            checkpoint = stages.pull(recipe, progress)
            stage.detail = f"{checkpoint.name} from {checkpoint.source}"
        _prepare_native(recipe, progress)
        key = build_key(recipe, checkpoint.file_hashes(progress))
        with cache.locked(key, progress):
            built = None if force else cache.find(key, progress)
            cached = built is not None
            if built is None:
                stages.require_libraries()
                stages.require_device(recipe)
                cost = estimate(recipe, _model_size(checkpoint))
                require(cost, cache=cache.root)
                if not same_disk(cache.root, target):
                    require_disk(target, 2 * cost.disk["engine"], "the artifact")
                built = _build_engine(recipe, checkpoint, key, cache, progress)
            manifest = _own_manifest(built, recipe, checkpoint)
            if manifest.embedding is None:
                check_quality(manifest.parity, recipe.quality)
            else:
                check_embedding_quality(manifest.embedding.parity, recipe.quality)
            with progress.stage("write") as stage:
                manifest = _place(manifest, cache.entry(key), target)
                stage.detail = f"{target}{' (from the build cache)' if cached else ''}"
        cache.trim()
    return BuildResult(target, manifest, cached)


def _build_engine(
    recipe: Recipe, checkpoint: Checkpoint, key: str, cache: BuildCache, progress: BuildProgress
) -> Manifest:
    """Run every stage and leave the engine in the cache as a whole artifact."""
    with ArtifactWriter(cache.entry(key)) as writer:
        prepared = PreparedWeights()
        if needs_preparing(recipe):
            with progress.stage("calibrate" if needs_calibration(recipe) else "import") as stage:
                prepared = prepare_weights(checkpoint, recipe, cache.root / _CALIBRATION, progress)
                stage.detail = prepared.detail
        with progress.stage("trace") as stage:
            traced = stages.trace(checkpoint, recipe, prepared.dense)
            stage.detail = f"{sum(traced.operators.values())} operators"
        with progress.stage("fuse") as stage:
            fused = stages.fuse(traced, recipe, progress)
            stage.detail = f"{sum(fused.operators.values())} operators"
        with progress.stage("quantize") as stage:
            quantized = stages.quantize(fused, recipe, progress, prepared)
            stage.detail = ", ".join(f"{kind} {format_size(size)}" for kind, size in quantized.weights.items())
        with progress.stage("compile") as stage:
            engine = stages.compile_engine(quantized, recipe, writer.path, progress)
            stage.detail = f"{engine.backend.name} {engine.backend.version.partition('-')[0]}"
            stage.detail += engine.backend.summary
        del traced, fused, quantized, prepared
        release_memory()
        _add_side_files(checkpoint, engine, writer.path)
        manifest = _manifest(recipe, checkpoint, engine, key)
        if recipe.draft_head is not None:
            with progress.stage("head") as stage:
                manifest.draft_head = build_head(recipe, checkpoint, writer.path, progress)
                stage.detail = manifest.draft_head.name
        if recipe.parity.enabled:
            with progress.stage("parity") as stage:
                stage.detail = _compare(manifest, recipe, checkpoint, writer.path, progress)
        manifest.build = progress.figures()
        (writer.path / CARD_NAME).write_text(model_card(manifest), encoding="utf-8")
        manifest = writer.commit(manifest)
    cache.record(key, manifest)
    return manifest


def _compare(manifest: Manifest, recipe: Recipe, checkpoint: Checkpoint, folder: Path, progress: BuildProgress) -> str:
    """Enter into `manifest` how the engine compares with the original, and return it in a few words."""
    scratch = folder / _SCRATCH
    scratch.mkdir()
    # The engine is not an artifact yet, but the runtime shall run it as one.
    artifact = Artifact(folder, _listing_files(manifest, folder))
    compare = measure if manifest.embedding is None else measure_embedding
    try:
        parity = compare(
            artifact,
            checkpoint,
            config=recipe.parity,
            trust_remote_code=recipe.trust_remote_code,
            scratch=scratch,
            progress=progress,
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if isinstance(parity, EmbeddingParity):
        assert manifest.embedding is not None
        manifest.embedding.parity = parity
        return f"cosine {parity.mean_cosine:.6f} on average, {parity.min_cosine:.6f} at least, of {parity.prompts}"
    manifest.parity = parity
    return (
        f"{parity.greedy_matching_prompts}/{parity.greedy_prompts} prompts equal, KL {parity.mean_kl:.1e}, "
        f"top-1 {parity.top1_agreement:.1%}"
    )


def _listing_files(manifest: Manifest, folder: Path) -> Manifest:
    files = {path.name: FileInfo(sha256="", bytes=path.stat().st_size) for path in folder.iterdir() if path.is_file()}
    return msgspec.structs.replace(manifest, files=files)


def _manifest(recipe: Recipe, checkpoint: Checkpoint, engine: stages.CompiledEngine, key: str) -> Manifest:
    limits = recipe.limits
    model = model_info(checkpoint, max_context_len=limits.max_context_len)
    embedding = None
    if recipe.task == "embed":
        pooled = recipe.embedding
        embedding = EmbeddingInfo(size=model.hidden_size, pooling=pooled.pooling, normalize=pooled.normalize)
    return Manifest(
        name=recipe.name,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        plancast_version=__version__,
        recipe=recipe_to_dict(recipe),
        recipe_hash=recipe_hash(recipe),
        model=model,
        backend=engine.backend,
        hardware=HardwareInfo(
            machine=this_machine().machine, isa=this_machine().isa if engine.backend.blob is not None else []
        ),
        plugins={name: version for name, version in installed_plugins().items() if name in engine.operators}
        | engine.backend.plugins,
        kv=engine.kv,
        limits=Limits(
            max_context_len=limits.max_context_len,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
        ),
        defaults=_defaults(recipe),
        weights_bytes=engine.weights,
        operators=engine.operators,
        operators_traced=engine.operators_traced,
        embedding=embedding,
        build={},
        build_key=key,
    )


def _own_manifest(built: Manifest, recipe: Recipe, checkpoint: Checkpoint) -> Manifest:
    """The manifest of a cached engine, with what the recipe says beyond the engine."""
    return msgspec.structs.replace(
        built,
        name=recipe.name,
        recipe=recipe_to_dict(recipe),
        recipe_hash=recipe_hash(recipe),
        model=msgspec.structs.replace(
            built.model,
            name=checkpoint.name,
            source=checkpoint.source,
            revision=checkpoint.revision,
            license=checkpoint.license,
        ),
        defaults=_defaults(recipe),
    )


def _defaults(recipe: Recipe) -> RuntimeDefaults:
    runtime = recipe.runtime
    return RuntimeDefaults(
        **{name: getattr(runtime, name) for name in runtime.__struct_fields__},
        num_threads=recipe.backend.num_threads,
        speculation=recipe.speculation,
    )


def _add_side_files(checkpoint: Checkpoint, engine: stages.CompiledEngine, folder: Path) -> None:
    """What serving needs beside the engine, what the licence asks for, and the layer that `inspect` draws."""
    from zoo.checkpoint import SIDE_FILES

    licences = [path.name for path in checkpoint.folder.iterdir() if path.name.upper().startswith(("LICEN", "NOTICE"))]
    for name in (*SIDE_FILES, *licences):
        if (checkpoint.folder / name).is_file():
            shutil.copyfile(checkpoint.folder / name, folder / name)
    template = checkpoint.chat_template
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / GRAPH_NAME).write_bytes(msgspec.json.encode(engine.graphs))


def _place(manifest: Manifest, entry: Path, target: Path) -> Manifest:
    """Put the cached engine in `entry` at `target`, under its own manifest. What is there already, stays."""
    if (present := _same_artifact(target, manifest)) is not None:
        return present
    with ArtifactWriter(target) as writer:
        for name in manifest.files:
            if name != CARD_NAME:
                place(entry / name, writer.path / name)
        (writer.path / CARD_NAME).write_text(model_card(manifest), encoding="utf-8")
        known = {name: info for name, info in manifest.files.items() if name != CARD_NAME}
        return writer.commit(manifest, known)


def _same_artifact(target: Path, manifest: Manifest) -> Manifest | None:
    """The manifest of the artifact at `target`, where that is whole and would be written just so again."""
    try:
        present = read_manifest(target)
        check_files(target, present.files, full=False, hint="")
    except ArtifactError:
        return None
    same = msgspec.structs.replace(present, digest=manifest.digest, files=manifest.files) == manifest
    return present if same else None


def _check_target(target: Path, recipe: Recipe, *, force: bool) -> None:
    """Raise unless `target` may be replaced by an artifact of `recipe`."""
    check_replaceable(target)
    try:
        other = read_manifest(target).name
    except ArtifactError:
        return
    if other != recipe.name and not force:
        raise BuildError(
            f"{target}: holds the engine of another recipe, {other}; choose another --out, or replace it with --force"
        )


def _prepare_native(recipe: Recipe, progress: BuildProgress) -> None:
    """Build our C++ operators where the recipe wants them and they are not there yet."""
    from plugins.native import NativeBuildError, build_native, find_native

    if not uses_native(recipe) or find_native() is not None:
        return
    with progress.stage("native") as stage:
        try:
            build_native()
            stage.detail = "C++ operators"
        except NativeBuildError as error:
            reason = (str(error).splitlines() or ["unknown"])[0]
            stage.detail = "not built"
            progress.note(f"loading and products of int8 weights will be slower: {reason}")


def _model_size(checkpoint: Checkpoint) -> ModelSize:
    info = model_info(checkpoint, max_context_len=1)
    return ModelSize(num_parameters(checkpoint), info.num_layers, info.vocab_size, info.hidden_size)


def _gguf_size(path: Path, recipe: Recipe) -> ModelSize:
    """The sizes in a GGUF file's header. Raises as reading it does, and `BuildError` where it names none."""
    from zoo.gguf_header import read_gguf_header

    header = read_gguf_header(path)
    stages.check_context(recipe, path.stem, header.context_length)
    embedding = next((tensor for tensor in header.tensors if tensor.name == "token_embd.weight"), None)
    layers = header.metadata.get(f"{header.architecture}.block_count")
    if embedding is None or not isinstance(layers, int):
        raise BuildError(f"{path}: names no layers or has no token embedding, so it is no decoder's file")
    return ModelSize(header.num_elements, layers, max(embedding.shape), min(embedding.shape))


def _cache() -> BuildCache:
    from zoo.store import home

    return BuildCache(home() / "builds")
