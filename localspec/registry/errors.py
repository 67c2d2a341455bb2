"""What can go wrong with models; the subtree below errors.RegistryError.

RegistryError                400  registry_error
├── CatalogueError           400  catalogue_error     models.toml: file, line, key, what is allowed
├── BadGguf                  400  bad_gguf            no GGUF, cut, or contradicting itself
│   └── UnsafeModel          400  unsafe_model        llama.cpp would crash on it or misread it
├── NotMatched               400  not_a_matched_pair  tokenizers differ; names the first difference
├── CannotRollBack           400  cannot_roll_back    the architecture cannot take tokens back
├── DoesNotFit               400  does_not_fit        too little memory even without a draft
├── PullCancelled            409  pull_cancelled
├── StoreError               500  store_error
│   ├── DiskFull             507  disk_full           says bytes needed and free
│   ├── StoreReadOnly        403  store_read_only
│   ├── RecordTooNew         409  record_too_new      by a newer localspec; left untouched
│   └── Damaged              500  file_damaged        a file is cut or its hash is wrong
└── HubError                 502  hub_error
    ├── Offline              503  offline
    ├── Gated                403  gated
    │   └── BadToken         401  bad_token           the hub does not accept the token sent
    ├── NetworkSettings      400  network_settings    a proxy or certificate file that cannot be used
    ├── ProxyRefused         502  proxy_refused       it wants a password, or does not let us through
    ├── Untrusted            502  untrusted           a certificate nobody vouches for
    ├── NotOnHub             404  not_on_hub
    ├── WebPage              502  web_page            a captive portal answered, not the hub
    ├── FileChanged          502  file_changed        the file changed while it was fetched
    ├── HashMismatch         502  hash_mismatch       what came is not what the hub states
    └── Unreachable          502  hub_unreachable     gave up after retries
"""

from __future__ import annotations

from localspec.errors import RegistryError


class CatalogueError(RegistryError):
    code = "catalogue_error"


class BadGguf(RegistryError):
    code = "bad_gguf"


class UnsafeModel(BadGguf):
    code = "unsafe_model"


class NotMatched(RegistryError):
    code = "not_a_matched_pair"


class CannotRollBack(RegistryError):
    code = "cannot_roll_back"


class DoesNotFit(RegistryError):
    code = "does_not_fit"


class PullCancelled(RegistryError):
    code = "pull_cancelled"
    status = 409


class StoreError(RegistryError):
    code = "store_error"
    status = 500


class DiskFull(StoreError):
    code = "disk_full"
    status = 507


class StoreReadOnly(StoreError):
    code = "store_read_only"
    status = 403


class RecordTooNew(StoreError):
    code = "record_too_new"
    status = 409


class Damaged(StoreError):
    code = "file_damaged"


class HubError(RegistryError):
    code = "hub_error"
    status = 502


class Offline(HubError):
    code = "offline"
    status = 503


class Gated(HubError):
    code = "gated"
    status = 403


class BadToken(Gated):
    code = "bad_token"
    status = 401


class NetworkSettings(HubError):
    code = "network_settings"
    status = 400


class ProxyRefused(HubError):
    code = "proxy_refused"


class Untrusted(HubError):
    code = "untrusted"


class NotOnHub(HubError):
    code = "not_on_hub"
    status = 404


class WebPage(HubError):
    code = "web_page"


class FileChanged(HubError):
    code = "file_changed"


class HashMismatch(HubError):
    code = "hash_mismatch"


class Unreachable(HubError):
    code = "hub_unreachable"
