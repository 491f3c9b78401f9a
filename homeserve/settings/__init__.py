"""The only reader of argv, of `HOMESERVE_*` variables and of homeserve.toml: one frozen `Settings`, made once.

The dataclass (`table`) is also the table. Each field carries its help, bounds and group in its metadata, and the flag
parser, the environment reader, the file reader (`readers`) and `--print-config` are all made from
`dataclasses.fields(Settings)`: an option that exists in one of them exists in all, and none can be read without being
checked by the same `Option.convert` (`option`). What several options say together is checked last (`together`).

    flags  >  HOMESERVE_<FIELD>  >  ./homeserve.toml  >  $XDG_CONFIG_HOME/homeserve/homeserve.toml  >  default

Nothing is ignored in silence. A flag of a feature that this version lacks is known (so that a script written for a
later version gets an answer) but takes only the value that changes nothing; any other is a `SettingError` saying so.
"""

from __future__ import annotations

from homeserve.settings.models import ModelEntry as ModelEntry
from homeserve.settings.models import chosen as chosen
from homeserve.settings.models import requests_most as requests_most
from homeserve.settings.models import settings_of as settings_of
from homeserve.settings.option import DRAFTS_MOST as DRAFTS_MOST
from homeserve.settings.option import VECTOR_MAX as VECTOR_MAX
from homeserve.settings.option import Option as Option
from homeserve.settings.option import near as near
from homeserve.settings.places import cache_dir as cache_dir
from homeserve.settings.places import default_cache_dir as default_cache_dir
from homeserve.settings.places import environment as environment
from homeserve.settings.places import log_dir as log_dir
from homeserve.settings.places import read_api_keys as read_api_keys
from homeserve.settings.places import runtime_dir as runtime_dir
from homeserve.settings.places import state_dir as state_dir
from homeserve.settings.places import toml_paths as toml_paths
from homeserve.settings.readers import add_flags as add_flags
from homeserve.settings.readers import load as load
from homeserve.settings.readers import refuse_unknown as refuse_unknown
from homeserve.settings.readers import resolve as resolve
from homeserve.settings.table import CARD_BACKENDS as CARD_BACKENDS
from homeserve.settings.table import Settings as Settings
from homeserve.settings.table import flag as flag
from homeserve.settings.table import options as options
from homeserve.settings.table import ranks_of as ranks_of
from homeserve.settings.table import variable as variable
from homeserve.settings.together import check_devices as check_devices
from homeserve.settings.together import check_together as check_together
from homeserve.settings.together import flip_mode as flip_mode
from homeserve.settings.together import flip_said as flip_said
from homeserve.settings.together import why_no_drafting as why_no_drafting
from homeserve.settings.together import why_no_flip as why_no_flip
