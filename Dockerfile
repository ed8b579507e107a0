# docker build -t precision-bench .
# docker run --rm --gpus all -v "$PWD/data:/data" -v "$PWD/results:/results" precision-bench
# The image has torch for the CUDA that its tag names. Your own network or script: mount it at /work.
ARG TORCH=pytorch/pytorch:2.9.0-cuda12.8-cudnn9-runtime
FROM ${TORCH}

LABEL org.opencontainers.image.title="precision-bench" \
      org.opencontainers.image.licenses="MIT"

# torch.compile builds a launcher with it
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

COPY pyproject.toml README.md LICENSE precision_bench.py /source/
COPY bench /source/bench
# the image's own torch satisfies the package's range, and stays
RUN python -m pip install --no-cache-dir /source && rm -rf /source

# results belong to the user of the host with: docker run --user "$(id -u):$(id -g)"
RUN useradd --create-home --uid 10001 bench && install -d -o bench /data /results /work
USER bench
ENV HOME=/home/bench
WORKDIR /work
VOLUME ["/data", "/results"]

ENTRYPOINT ["precision-bench"]
CMD ["card", "--data-dir", "/data", "--out", "/results"]
