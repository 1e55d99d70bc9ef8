//! `config.json` -> validated [`Config`].
