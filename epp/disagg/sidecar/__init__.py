"""The decode worker's sidecar: has the prompt computed where the picker said, then lets the request go on to vLLM.

`bodies` changes the two requests' bodies, `exchange` holds the rules of one request (sans-IO), `caller` asks prefill
workers by them, `proxy` is the reverse proxy, `beside_envoy` the service of an Envoy that takes its place, `service`
starts it all.
"""
