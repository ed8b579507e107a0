# docs/card.md says how it is built and run.
# The image has torch for the CUDA that its tag names
ARG TORCH=pytorch/pytorch:2.9.0-cuda12.8-cudnn9-runtime
FROM ${TORCH}

LABEL org.opencontainers.image.title="precision-bench" \
      org.opencontainers.image.licenses="MIT"

# torch.compile builds with it
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

COPY pyproject.toml README.md LICENSE precision_bench.py /source/
COPY bench /source/bench
# The image's own torch satisfies the package's range, and stays. Images of torch 2.10 and later have
# the system's Python, which pip leaves alone without this variable
RUN PIP_BREAK_SYSTEM_PACKAGES=1 python -m pip install --no-cache-dir /source && rm -rf /source

# Any --user may run it, with a name or without. /results is not made: without a folder of the host
# there, what is measured would be lost with the container, so that it is refused
RUN install -d -m 1777 /home/bench /data && install -d /work
USER 10001:10001
ENV HOME=/home/bench USER=bench
WORKDIR /work

ENTRYPOINT ["precision-bench"]
CMD ["card", "--data-dir", "/data", "--out", "/results"]
