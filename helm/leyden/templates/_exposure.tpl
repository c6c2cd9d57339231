{{/* An Ingress of a service. Arguments: root, name. */}}
{{- define "leyden.ingress" -}}
{{- $ingress := (index .root.Values .name).ingress -}}
{{- if $ingress.enabled -}}
{{- /* Of ingress-nginx; other controllers ignore them. Tokens arrive one by one, and uploads are long. */ -}}
{{- $streaming := dict
  "nginx.ingress.kubernetes.io/proxy-buffering" "off"
  "nginx.ingress.kubernetes.io/proxy-read-timeout" "3600"
  "nginx.ingress.kubernetes.io/proxy-send-timeout" "3600"
  "nginx.ingress.kubernetes.io/proxy-body-size" "0"
-}}
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata:
  {{- include "leyden.metadata" (dict "root" .root "component" .name "annotations" (merge dict ($ingress.annotations | default dict) $streaming)) | nindent 2 }}
spec:
  {{- with $ingress.className }}
  ingressClassName: {{ . }}
  {{- end }}
  {{- with $ingress.tlsSecret }}
  tls:
  - hosts: [{{ $ingress.host | quote }}]
    secretName: {{ . }}
  {{- end }}
  rules:
  - host: {{ $ingress.host | quote }}
    http:
      paths:
      - path: /
        pathType: Prefix
        backend:
          service:
            name: {{ include "leyden.fullname" .root }}-{{ .name }}
            port:
              name: http
{{- end -}}
{{- end }}

{{/* An HTTPRoute of the Gateway API. Arguments: root, name, port. */}}
{{- define "leyden.httpRoute" -}}
{{- $route := (index .root.Values .name).httpRoute -}}
{{- if $route.enabled -}}
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata:
  {{- include "leyden.metadata" (dict "root" .root "component" .name "annotations" $route.annotations) | nindent 2 }}
spec:
  parentRefs:
    {{- toYaml $route.parentRefs | nindent 4 }}
  hostnames:
    {{- toYaml $route.hostnames | nindent 4 }}
  rules:
  - matches:
    - path:
        type: PathPrefix
        value: /
    backendRefs:
    - name: {{ include "leyden.fullname" .root }}-{{ .name }}
      port: {{ .port }}
    timeouts:
      # An upload or an answer lasts as long as its sender takes.
      request: {{ $route.timeout | default "3600s" }}
{{- end -}}
{{- end }}
