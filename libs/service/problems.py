"""The old name of `errors`."""

from leyden.libs.service.errors import JsonResponse as JsonResponse
from leyden.libs.service.errors import problem_response as problem_response
