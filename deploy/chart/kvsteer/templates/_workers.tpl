{{/* Arguments of `vllm serve` for one entry of `workers`; takes a dict of `root` and `worker`. */}}
{{- define "kvsteer.vllmArgs" -}}
{{- $w := .worker -}}
{{- $ports := .root.Values.pool.targetPorts -}}
- {{ $w.model | quote }}
- --port={{ if $w.sidecar }}{{ add (first $ports) 200 }}{{ else }}{{ first $ports }}{{ end }}
- --enable-prompt-tokens-details
{{- if $w.kvEvents }}
- --kv-events-config={"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657","buffer_steps":10000}
{{- end }}
{{- with (include "kvsteer.kvTransfer" .) }}
- --kv-transfer-config={{ . }}
{{- end }}
{{- with $w.speculative }}
- --speculative-config={{ toJson . }}
{{- end }}
{{- with $w.lws }}
- --data-parallel-size={{ .dataParallel }}
- --data-parallel-size-local={{ .dataParallelLocal }}
- --data-parallel-address=$(LWS_LEADER_ADDRESS)
- --data-parallel-rpc-port=5555
- --data-parallel-multi-port-external-lb
- --enable-expert-parallel
{{- end }}
{{- with $w.args }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* NIXL for workers with a role, the host tier where asked for, or both as vLLM's MultiConnector. */}}
{{- define "kvsteer.kvTransfer" -}}
{{- $w := .worker -}}
{{- $nixl := dict "kv_connector" "NixlConnector" "kv_role" "kv_both" -}}
{{- $offload := dict "kv_connector" "OffloadingConnector" "kv_role" "kv_both" "kv_connector_extra_config" (dict "cpu_bytes_to_use" (mul 1073741824 (int $w.offloadGiB)) "self_describing_kv_events" true) -}}
{{- if and $w.role $w.offloadGiB -}}
{{- dict "kv_connector" "MultiConnector" "kv_role" "kv_both" "kv_connector_extra_config" (dict "connectors" (list $nixl $offload)) | toJson -}}
{{- else if $w.role -}}
{{- toJson $nixl -}}
{{- else if $w.offloadGiB -}}
{{- toJson $offload -}}
{{- end -}}
{{- end -}}

{{/* Labels of a worker's pods: those the pool selects by, and what the picker reads. */}}
{{- define "kvsteer.workerLabels" -}}
{{ include "kvsteer.workerSelector" .root }}
app.kubernetes.io/component: {{ .worker.name }}
llm-d.ai/engine-type: vllm
{{- with .worker.role }}
llm-d.ai/role: {{ . }}
{{- end }}
{{- end -}}

{{- define "kvsteer.workerPod" -}}
{{- $w := .worker -}}
{{- $ports := .root.Values.pool.targetPorts -}}
{{- $own := ternary "vllm" "http-0" (not (not $w.sidecar)) }}
terminationGracePeriodSeconds: 300
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $w.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $w.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if $w.sidecar }}
serviceAccountName: {{ include "kvsteer.name" .root }}-sidecar
# Up before vLLM, and down after it: what vLLM still answers passes through it.
initContainers:
- name: sidecar
  image: {{ include "kvsteer.image" .root }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  restartPolicy: Always
  command: [/usr/bin/python3, -m, epp.cli, sidecar]
  args:
  - --listen=:{{ first $ports }}
  - --decoder=127.0.0.1:{{ add (first $ports) 200 }}
  - --pool-name={{ include "kvsteer.pool" .root }}
  - --pool-namespace=$(NAMESPACE)
  - --admin=:9091
  {{- with $w.sidecarArgs }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  env:
  - name: NAMESPACE
    valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
  ports:
  - {name: http-0, containerPort: {{ first $ports }}}
  - {name: sidecar, containerPort: 9091}
  startupProbe:
    httpGet: {path: /healthz, port: sidecar}
    periodSeconds: 1
    failureThreshold: 60
  resources:
    requests: {cpu: 250m, memory: 128Mi}
    limits: {memory: 1Gi}
  securityContext: {{- include "kvsteer.containerSecurity" .root | nindent 4 }}
    runAsUser: 65532
{{- end }}
containers:
- name: vllm
  image: {{ $w.image }}
  {{- if $w.lws }}
  # The first rank of this host follows from its place in the group.
  command: [/bin/sh, -c, 'exec vllm serve "$@" --data-parallel-start-rank=$((LWS_WORKER_INDEX * {{ $w.lws.dataParallelLocal }}))', vllm]
  {{- else }}
  command: [vllm, serve]
  {{- end }}
  args: {{- include "kvsteer.vllmArgs" . | nindent 2 }}
  env:
  - name: HF_HOME
    value: /cache
  {{- if $w.role }}
  - name: VLLM_NIXL_SIDE_CHANNEL_HOST
    valueFrom: {fieldRef: {fieldPath: status.podIP}}
  - {name: VLLM_NIXL_SIDE_CHANNEL_PORT, value: "5600"}
  {{- end }}
  {{- with $w.hfTokenSecret }}
  - name: HF_TOKEN
    valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}
  {{- end }}
  {{- with $w.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  ports:
  {{- if $w.sidecar }}
  - {name: vllm, containerPort: {{ add (first $ports) 200 }}}
  {{- else }}
  {{- range $i, $port := $ports }}
  - {name: http-{{ $i }}, containerPort: {{ $port }}}
  {{- end }}
  {{- end }}
  {{- if $w.kvEvents }}
  - {name: kv-events, containerPort: 5557}
  - {name: kv-replay, containerPort: 5657}
  {{- end }}
  startupProbe:
    httpGet: {path: /health, port: {{ $own }}}
    periodSeconds: 10
    failureThreshold: 360       # an hour: large models load for long
  livenessProbe:
    httpGet: {path: /health, port: {{ $own }}}
    periodSeconds: 10
    failureThreshold: 6
  readinessProbe:
    httpGet: {path: /v1/models, port: {{ $own }}}
    periodSeconds: 5
    timeoutSeconds: 5
  lifecycle:
    # Out of the pool first: vLLM answers 500 while it drains, and says that it is healthy.
    preStop:
      sleep: {seconds: 5}
  {{- with $w.resources }}
  resources: {{- toYaml . | nindent 4 }}
  {{- end }}
  volumeMounts:
  - {name: shm, mountPath: /dev/shm}
  - {name: cache, mountPath: /cache}
volumes:
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ $w.shmGiB | default 8 }}Gi}
- name: cache
  emptyDir: {}
{{- end -}}
