{{/* The pods that runner and controller make Jobs of; values lie over any part. */}}
{{- define "leyden.podTemplates" -}}
{{- range $key, $part := dict "agent" "rollouts" "trainer" "trainer" }}
{{ $key }}.yaml: |
  {{- include "leyden.podWith" (dict "pod" (include (printf "leyden.%sPod" $key) $) "over" (index $.Values $part "podTemplate")) | nindent 2 }}
{{- end }}
{{- end }}
