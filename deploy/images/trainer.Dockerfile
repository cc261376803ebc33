# A light base for trainers: torch and the client. Build your trainer FROM it, or give your own
# image of torch as the base:
#
#   docker build -f deploy/images/trainer.Dockerfile -t registry.example.com/dataservice-trainer:0.1.0 .
#   docker build ... --build-arg BASE_IMAGE=nvcr.io/nvidia/pytorch:26.09-py3 --build-arg TORCH=base .
ARG BASE_IMAGE=python:3.11.14-slim-bookworm

FROM ${BASE_IMAGE}
# `pinned` installs torch and all else in the versions of constraints.txt; `base` keeps what the
# base image brings, and installs only what it lacks or has in a version that is too old.
ARG TORCH=pinned
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="dataservice-trainer" \
      org.opencontainers.image.description="Balanced data loading for multimodal LLM training: the trainer's client" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ONLY_BINARY=:all: \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
WORKDIR /build
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY deploy/images/requirements.py ./
COPY protos ./protos
COPY trainer_client ./trainer_client
COPY dataservice ./dataservice
RUN if [ "$TORCH" = pinned ]; then set --; else set -- --without torch; : > constraints.txt; fi \
 && { python -c "import tomllib" || python -m pip install -c constraints.txt tomli; } \
 && python requirements.py "$@" > requirements.txt \
 && python -m pip install -c constraints.txt -r requirements.txt "setuptools>=77" \
 && python -m pip install --no-deps --no-build-isolation . \
 && rm -rf /build/*

USER 10001:10001
WORKDIR /tmp
CMD ["python", "-c", "import trainer_client; print(trainer_client.__all__)"]
