"""The old name of the addresses in `settings`."""

from leyden.libs.service.settings import HttpAddress as HttpAddress
