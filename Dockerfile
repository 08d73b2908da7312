# From this repository alone, for a CPU:
#   docker build -t popxl-xla .
#   docker run --rm -v "$PWD/runs:/app/runs" popxl-xla run_finetuning.py --config tiny --save runs/tiny
# for NVIDIA GPUs, whose CUDA libraries come with JAX; the host needs the driver and the container
# toolkit:
#   docker build -t popxl-xla:cuda --build-arg REQUIREMENTS=requirements-cuda.txt .
#   docker run --rm --gpus all --shm-size 16g -v "$PWD/runs:/app/runs" popxl-xla:cuda run_finetuning.py --config tiny --save runs/tiny
# The folder of runs must belong to user 10001, or give --user "$(id -u)".
FROM python:3.12-slim
ARG REQUIREMENTS=requirements.txt
WORKDIR /app
# What changes rarely comes first, so that a change of the application installs nothing again.
COPY requirements*.txt ./
COPY runtime ./runtime
RUN pip install --no-cache-dir -r ${REQUIREMENTS}
COPY . .
RUN useradd --uid 10001 --create-home trainer && mkdir -p runs && chown trainer runs
USER 10001
# Caches of libraries, for any --user.
ENV HOME=/tmp PYTHONDONTWRITEBYTECODE=1
ENTRYPOINT ["python3"]
CMD ["run_finetuning.py", "--help"]
