"""`kvsteer demo`: recorded agent sessions through a real Envoy, the picker and emulated workers."""
