# The standalone server: a name server and a broker in one process. See docs/guide/docker.md.

FROM python:3.11-slim AS build
WORKDIR /source
# For the compiled core; only the build stage has it.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY src ./src
RUN python -m venv /opt/turbopump \
    && /opt/turbopump/bin/pip install --no-cache-dir .

FROM python:3.11-slim
# Numbers, so that an orchestrator can see that this is not root.
RUN groupadd --gid 10001 turbopump \
    && useradd --uid 10001 --gid 10001 --home-dir /var/lib/turbopump --create-home \
        --shell /usr/sbin/nologin turbopump
COPY --from=build /opt/turbopump /opt/turbopump
ENV PATH=/opt/turbopump/bin:$PATH \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /var/lib/turbopump
VOLUME ["/var/lib/turbopump"]
EXPOSE 9876 10911
STOPSIGNAL SIGTERM
# Both servers share one event loop: the name server's answer shows that the broker is alive too.
HEALTHCHECK --interval=15s --timeout=10s --start-period=20s --retries=3 \
    CMD ["turbopump", "cluster", "list", "--nameserver", "127.0.0.1:9876"]
ENTRYPOINT ["turbopump", "standalone", "--dir", "/var/lib/turbopump", "--host", "0.0.0.0"]
