# The recipes and everything that they need. docs/image.md says how to build, push and run this image.
#
# Any base with Python 3.11 or newer will do. This one has a C compiler, without which torch.compile fails at run time.
ARG BASE=docker.io/library/python:3.11-bookworm
# Digest of the base, sha256:... It has no default and is required: a tag may name another image next month.
ARG BASE_DIGEST
FROM ${BASE}@${BASE_DIGEST}

# Caches need a home, and torch asks for the name of the user. A base may have a user 1000 already.
RUN getent passwd 1000 || useradd --create-home --uid 1000 recipes

WORKDIR /opt/accelerate-recipes
# The recipes may write to these folders only. What must outlive the container goes to a volume.
# A venv is needed because pip would not install beside a distribution's Python; it sees the torch that a base may bring.
RUN install --directory --owner=1000 .cache outputs \
    && python3 -m venv --system-site-packages .venv
# NVIDIA's bases set PIP_CONSTRAINT to versions that contradict the lock.
ENV PATH=/opt/accelerate-recipes/.venv/bin:$PATH PYTHONUNBUFFERED=1 PIP_CONSTRAINT=

COPY requirements.lock ./
# chess and rouge-score come as sources: the locked setuptools builds them. pip alone would download another one unchecked.
RUN sed -n '/^setuptools==/,/[^\]$/p' requirements.lock >setuptools.lock \
    && pip install --no-cache-dir --require-hashes --no-deps --requirement setuptools.lock \
    && pip install --no-cache-dir --require-hashes --no-deps --no-build-isolation --use-pep517 --requirement requirements.lock \
    && rm setuptools.lock

# What changes most comes last: a new recipe costs a layer of kilobytes.
COPY data data
COPY LICENSE README.md pyproject.toml requirements.txt ./
COPY src src
COPY accelerate_configs accelerate_configs
COPY recipes recipes
# The library is not found by PYTHONPATH: Enroot would let the image's PYTHONPATH win, and a mounted checkout would use the
# image's library. chmod: a checkout under umask 077 would be closed to all but root.
RUN pip install --no-cache-dir --no-index --no-deps --no-build-isolation --editable . \
    && chmod -R a+rX data src accelerate_configs recipes LICENSE ./*.*

ARG BASE
ARG BASE_DIGEST
ARG REVISION=unknown
LABEL org.opencontainers.image.title="accelerate-recipes" \
    org.opencontainers.image.description="Fine-tuning recipes for HuggingFace Accelerate with FSDP" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.revision="${REVISION}" \
    org.opencontainers.image.base.name="${BASE}" \
    org.opencontainers.image.base.digest="${BASE_DIGEST}"

# A number, because Kubernetes' runAsNonRoot does not accept a name.
USER 1000
# No entrypoint, even if the base has one: the command is process 1, and gets the signals.
ENTRYPOINT []
CMD ["python", "-m", "accelerate_recipes", "--help"]
