#!/bin/sh
# Starts a service in its container: service.sh buffer|reward|learner|generator|dashboard [OPTION]...
# Addresses are those of compose.yaml. With certificates among its secrets the service speaks TLS.
set -eu
service=$1
shift
secrets=${MESH_SECRETS:-/run/secrets}

case $service in
  buffer)
    set -- "$@" --network.port=7000 --buffer.redis=redis://rollmesh@redis:6379/0 \
      --buffer.redis_password_file=$secrets/redis.password
    ;;
  *) set -- "$@" --mesh buffer:7000 ;;
esac
case $service in
  buffer | reward | learner)
    set -- "$@" --network.host=0.0.0.0 --network.advertise="$service" \
      --network.metrics_host=0.0.0.0 --network.metrics_port=9100 \
      --security.token_file=$secrets/grant --security.metrics_key_file=$secrets/metrics.key
    [ ! -e $secrets/tls.crt ] || set -- "$@" --security.tls_ca=$secrets/ca.crt \
      --security.tls_cert=$secrets/tls.crt --security.tls_key=$secrets/tls.key
    ;;
  generator)
    # Replicas differ in the name of their container, under which the network knows them.
    set -- "$@" --advertise "$(hostname).$MESH_DOMAIN" --metrics-host 0.0.0.0 --metrics-port 9100 \
      --threads "$OMP_NUM_THREADS" --metrics-key-file $secrets/metrics.key --endpoint-key-file $secrets/endpoint.key
    ;;
  dashboard) set -- "$@" --port 8080 --key-file $secrets/page.key ;;
esac
case $service in
  generator | dashboard)
    set -- "$@" --host 0.0.0.0 --token-file $secrets/grant
    [ ! -e $secrets/tls.crt ] || set -- "$@" --tls-ca $secrets/ca.crt --tls-cert $secrets/tls.crt \
      --tls-key $secrets/tls.key
    ;;
esac
exec rollmesh "$service" "$@"
