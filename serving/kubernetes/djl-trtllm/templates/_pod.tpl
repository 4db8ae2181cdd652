{{- /* The specification of a pod, without what its container runs: a dict of `root`, `name` and `container`, which is YAML. */ -}}
{{- define "pod" -}}
{{- $values := .root.Values -}}
serviceAccountName: {{ .root.Release.Name }}
automountServiceAccountToken: false
# The variables of a Service called `serving` or `option-...` would be read as options.
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "gracePeriod" .root }}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with $values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if and $values.gpus $values.tolerations }}
tolerations:
  {{- toYaml $values.tolerations | nindent 2 }}
{{- end }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "selector" .root | nindent 8 }}
containers:
  - name: {{ .name | default "server" }}
    image: {{ $values.image.repository }}:{{ $values.image.tag | default .root.Chart.AppVersion }}
    imagePullPolicy: {{ $values.image.pullPolicy }}
    {{- .container | nindent 4 }}
    env:
      {{- if and $values.model.id (not $values.model.volume) }}
      - name: HF_MODEL_ID
        value: {{ $values.model.id | quote }}
      {{- end }}
      {{- with $values.model.tokenSecret }}
      - name: HF_TOKEN
        valueFrom:
          secretKeyRef:
            name: {{ . }}
            key: hf-token
            optional: true
      {{- end }}
      {{- range $name, $value := include "options" .root | fromYaml }}
      - name: OPTION_{{ upper $name }}
        value: {{ include "text" $value }}
      {{- end }}
      {{- range $name, $value := $values.serving }}
      - name: SERVING_{{ upper $name }}
        value: {{ include "text" $value }}
      {{- end }}
      # For what compilers of kernels keep in the home directory: the image's is read-only.
      - name: HOME
        value: /tmp
      {{- with $values.env }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    resources:
      requests:
        cpu: {{ $values.resources.cpu | quote }}
        memory: {{ $values.resources.memory }}
        ephemeral-storage: {{ $values.resources.storage }}
      limits:
        # No limit of CPU: throttling would delay every stream.
        memory: {{ $values.resources.memory }}
        ephemeral-storage: {{ $values.resources.storage }}
        {{- if $values.gpus }}
        nvidia.com/gpu: {{ $values.gpus | quote }}
        {{- end }}
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities:
        drop: [ALL]
    volumeMounts:
      - name: tmp
        mountPath: /tmp
      - name: shm
        mountPath: /dev/shm
      {{- if $values.model.volume }}
      - name: model
        mountPath: /opt/ml/model
        readOnly: true
      {{- end }}
      {{- if $values.engineCache.claim }}
      - name: engines
        mountPath: /engines
      {{- end }}
      {{- if $values.sshSecret }}
      - name: ssh
        mountPath: /ssh
        readOnly: true
      {{- end }}
volumes:
  # Downloads, compiled engines, temporary files.
  - name: tmp
    emptyDir:
      sizeLimit: {{ $values.resources.storage }}
  # Ranks of an engine communicate through it, and a container has 64 MiB by default. It counts as memory.
  - name: shm
    emptyDir:
      medium: Memory
      sizeLimit: {{ $values.resources.sharedMemory }}
  {{- with $values.model.volume.claim }}
  - name: model
    persistentVolumeClaim:
      claimName: {{ . }}
      readOnly: true
  {{- end }}
  {{- with $values.model.volume.image }}
  - name: model
    image:
      reference: {{ . }}
      pullPolicy: {{ $values.image.pullPolicy }}
  {{- end }}
  {{- with $values.engineCache.claim }}
  - name: engines
    persistentVolumeClaim:
      claimName: {{ . }}
  {{- end }}
  {{- with $values.sshSecret }}
  - name: ssh
    secret:
      secretName: {{ . }}
      defaultMode: 0400
  {{- end }}
{{- end }}

{{- /* Ports, probes and the pause before SIGTERM of a container that serves. */ -}}
{{- define "server" -}}
ports:
  - name: http
    containerPort: 8080
# The process answers this as soon as it listens; until then liveness does not count.
startupProbe:
  httpGet:
    path: /v2/health/live
    port: http
  periodSeconds: 2
  failureThreshold: {{ ternary 900 60 (gt (int .Values.nodes) 1) }}
# Not /ping: that is 503 while a model loads, and a restart would only begin again.
livenessProbe:
  httpGet:
    path: /v2/health/live
    port: http
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 3
readinessProbe:
  httpGet:
    path: /ping
    port: http
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
lifecycle:
  preStop:
    # After SIGTERM new requests are refused, so the load balancers have to forget this pod before.
    exec:
      {{- if eq (int .Values.nodes) 1 }}
      command: [sleep, {{ .Values.drainDelay | quote }}]
      {{- else }}
      # mpirun gives its ranks a few seconds after SIGTERM. The server needs more, so it gets the signal before.
      command: [bash, -c, {{ tpl (.Files.Get "stop.sh") . | toJson }}]
      {{- end }}
{{- end }}
