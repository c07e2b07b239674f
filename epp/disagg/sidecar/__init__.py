"""The decode worker's sidecar: has the prompt computed where the picker said, then lets the request go on to vLLM.

`bodies` changes the two requests' bodies, `exchange` holds the rules of one request (sans-IO), `proxy` is the reverse
proxy that follows them, `targets` says whom it may ask.
"""
