# The Inferact service. Envoy runs beside it, in its own official image (see docker-compose.yml).
FROM python:3.12-slim

COPY requirements.lock /tmp/
RUN pip install --no-cache-dir --only-binary :all: --require-hashes -r /tmp/requirements.lock \
    && rm /tmp/requirements.lock \
    && printf '#!/bin/sh\nexec python -m extproc.cli "$@"\n' > /usr/local/bin/inferact \
    && chmod 755 /usr/local/bin/inferact \
    && install -d -o 10001 -g 10001 -m 0750 /run/inferact

WORKDIR /app
COPY extproc extproc
COPY admin admin
ENV PYTHONPATH=/app PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
RUN python -m compileall -q extproc admin

USER 10001:10001
ENTRYPOINT ["python", "-m", "extproc.cli"]
CMD ["serve", "-c", "/etc/inferact/inferact.yaml"]
