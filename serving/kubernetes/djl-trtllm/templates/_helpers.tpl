{{- /* The labels that select a release's pods that serve: no other release in the namespace has them. */ -}}
{{- define "selector" -}}
app.kubernetes.io/name: djl-trtllm
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: server
{{- end }}

{{- /* The labels of all objects. */ -}}
{{- define "labels" -}}
app.kubernetes.io/name: djl-trtllm
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Values.image.tag | default .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* metadata of an object, whose name is the release's. */ -}}
{{- define "metadata" -}}
name: {{ .Release.Name }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "labels" . | nindent 2 }}
{{- end }}

{{- /* Seconds that Kubernetes waits after preStop has begun: 20 are for the engine process's end and the last bytes. */ -}}
{{- define "gracePeriod" -}}
{{ add .Values.drainDelay .Values.serving.shutdown_timeout 20 }}
{{- end }}

{{- /* The options with those that follow from GPUs and nodes, as YAML. */ -}}
{{- define "options" -}}
{{- $derived := dict -}}
{{- if .Values.gpus -}}
{{- $_ := set $derived "tensor_parallel_degree" (mul .Values.gpus .Values.nodes) -}}
{{- end -}}
{{- if gt (int .Values.nodes) 1 -}}
{{- $_ := merge $derived (dict "num_nodes" .Values.nodes "gpus_per_node" .Values.gpus "backend" "pytorch") -}}
{{- end -}}
{{- if .Values.engineCache.claim -}}
{{- $_ := set $derived "engine_cache_dir" "/engines" -}}
{{- end -}}
{{- merge (deepCopy .Values.options) $derived | toYaml -}}
{{- end }}

{{- /* A value of an option as a variable's value; toString would make 1e+06 of a million. */ -}}
{{- define "text" -}}
{{ kindIs "string" . | ternary . (toJson .) | quote }}
{{- end }}
