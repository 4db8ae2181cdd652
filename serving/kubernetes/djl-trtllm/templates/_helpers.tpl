{{- /* The labels that select a release's pods: no other release in the namespace has them. */ -}}
{{- define "pods" -}}
app.kubernetes.io/name: djl-trtllm
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* The labels that select those of them that serve. */ -}}
{{- define "selector" -}}
{{ include "pods" . }}
app.kubernetes.io/component: server
{{- end }}

{{- /* The labels of all objects. */ -}}
{{- define "labels" -}}
{{ include "pods" . }}
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
{{- if and .Values.gpus (not (hasKey .Values.options "tensor_parallel_degree")) -}}
{{- $gpus := mul .Values.gpus .Values.nodes -}}
{{- $parts := mul (max 1 (int .Values.options.pipeline_parallel_degree)) (max 1 (int .Values.options.context_parallel_size)) -}}
{{- if mod $gpus $parts -}}
{{- fail (printf "%d GPUs (gpus times nodes) cannot be divided by %d (options.pipeline_parallel_degree times options.context_parallel_size): change one of them, or set options.tensor_parallel_degree to leave GPUs unused" $gpus $parts) -}}
{{- end -}}
{{- $_ := set $derived "tensor_parallel_degree" (div $gpus $parts) -}}
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
