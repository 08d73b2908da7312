# The CPU version, from this repository alone:
#   docker build -t popxl-xla .
#   docker run --rm -v "$PWD/runs:/app/runs" popxl-xla run_finetuning.py --config tiny --save runs/tiny
FROM python:3.12-slim
ARG REQUIREMENTS=requirements.txt
WORKDIR /app
# What changes rarely comes first, so that a change of the application installs nothing again.
COPY requirements*.txt ./
COPY runtime ./runtime
RUN pip install --no-cache-dir -r ${REQUIREMENTS}
COPY . .
ENTRYPOINT ["python3"]
CMD ["run_finetuning.py", "--help"]
