{{- define "kvsteer.name" -}}
{{- printf "%s-picker" .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvsteer.pool" -}}
{{- .Values.pool.name | default .Release.Name -}}
{{- end -}}

{{- define "kvsteer.image" -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}

{{- define "kvsteer.labels" -}}
app.kubernetes.io/name: kvsteer
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "kvsteer.pickerSelector" -}}
app.kubernetes.io/name: kvsteer
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: picker
{{- end -}}

{{/* Labels by which the pool knows its workers. */}}
{{- define "kvsteer.workerSelector" -}}
{{- if .Values.pool.selector -}}
{{- toYaml .Values.pool.selector -}}
{{- else -}}
app.kubernetes.io/name: vllm
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}
{{- end -}}

{{/* The same as KEY=VALUE,... */}}
{{- define "kvsteer.workerSelectorFlag" -}}
{{- $pairs := list -}}
{{- range $key, $value := (include "kvsteer.workerSelector" . | fromYaml) -}}
{{- $pairs = append $pairs (printf "%s=%s" $key $value) -}}
{{- end -}}
{{- join "," $pairs -}}
{{- end -}}

{{- define "kvsteer.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "kvsteer.gatewayClass" -}}
{{- $usual := dict "istio" "istio" "envoy-gateway" "envoy-gateway" "kgateway" "kgateway" "agentgateway" "agentgateway" "gke" "gke-l7-regional-external-managed" -}}
{{- .Values.gateway.className | default (get $usual .Values.gateway.flavour) -}}
{{- end -}}
