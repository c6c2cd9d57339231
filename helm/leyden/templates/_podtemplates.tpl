{{/* The pods that runner and controller make Jobs of; values replace any part. */}}
{{- define "leyden.podTemplates" -}}
{{- range $key, $part := dict "agent" "rollouts" "trainer" "trainer" }}
{{ $key }}.yaml: |
  {{- mergeOverwrite (include (printf "leyden.%sPod" $key) $ | fromYaml) (index $.Values $part "podTemplate" | default dict) | toYaml | nindent 2 }}
{{- end }}
{{- end }}
