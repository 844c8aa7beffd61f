{{/* Release and chart in one name, unless the release is called after the chart. */}}
{{- define "chairlift.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* What is installed for the whole cluster carries the namespace too: two releases do not collide. */}}
{{- define "chairlift.clusterName" -}}
{{- printf "%s-%s" .Release.Namespace (include "chairlift.name" .) -}}
{{- end -}}

{{/* The name is what pools' NetworkPolicies let through to the engines' admin port. */}}
{{- define "chairlift.selector" -}}
app.kubernetes.io/name: chairlift-operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* Each release leads for itself, also beside another one in the same namespace. */}}
{{- define "chairlift.lease" -}}
{{- printf "%s-operator" .Release.Name -}}
{{- end -}}

{{- define "chairlift.labels" -}}
{{ include "chairlift.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* Call with (list $ NAME). */}}
{{- define "chairlift.image" -}}
{{- $root := index . 0 -}}
{{- printf "%s/%s:%s" $root.Values.images.registry (index . 1) ($root.Values.images.tag | default $root.Chart.AppVersion) -}}
{{- end -}}
